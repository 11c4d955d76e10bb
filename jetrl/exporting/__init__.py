"""From a checkpoint of a job, or a Hugging Face folder, to a folder that transformers and vLLM load without jetrl."""
