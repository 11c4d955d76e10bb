"""Trainer operators around the linear layers that the rollout shares: packed attention, rotary, a token's log-probability.

`register()` gives transformers the packed backends by name; `choose()` picks one for a model and says why.
"""

from jetrl.attention.choice import Choice, choose, require_exact
from jetrl.attention.interface import register
from jetrl.attention.logprobs import token_logprobs
from jetrl.attention.rope import qk_norm_rotary, rotary

__all__ = ["Choice", "choose", "qk_norm_rotary", "register", "require_exact", "rotary", "token_logprobs"]
