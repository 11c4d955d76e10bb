"""FP8 kernels of jetrl: quantizers and block-scaled GEMMs, each beside its torch reference.

Imports neither jetrl nor vLLM nor VeRL. `jetrl_kernels.ops` holds the torch custom ops that the linear layer calls.
"""
