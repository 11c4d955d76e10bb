"""Files shipped with jetrl: the embedded model."""
