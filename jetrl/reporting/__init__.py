"""What `python -m jetrl.report` is made of: reading runs, comparing them, drawing them."""
