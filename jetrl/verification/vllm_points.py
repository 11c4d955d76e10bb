"""Observes a vLLM model in this process while it generates: the output of every operator, for chosen requests.

Works in eager mode with one worker in the engine's process. Merged projections are cut into their logical matrices; vLLM's
norm with residual gives the residual sum as its second output.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from jetrl.verification.points import EMBEDDING, FINAL_NORM, LM_HEAD, ROTARY_TABLE, PointStore

Emit = Callable[[str, torch.Tensor], None]


class VllmObserver:
    """Context manager. requests: vLLM's request id (as given to the engine) -> sequence number; limit: first position
    that is not recorded any more. store: what was seen."""

    def __init__(self, runner, requests: dict[str, int], limit: int) -> None:
        self.runner, self.requests, self.limit = runner, requests, limit
        self.store = PointStore()
        self._seen: set[tuple[int, int]] = set()
        self._hooks: list = []
        self._layer = 0
        self._table_seen = False
        self._rows = self._index = self._decode = None
        self._last = self._last_index = self._last_decode = None
        self._v2_batch = None
        self._stock_prepare = None

    def __enter__(self) -> "VllmObserver":
        model = self.runner.model
        self._follow_batches()
        self._hooks.append(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        packed = dict(getattr(model, "packed_modules_mapping", None) or {})
        for name, module in model.named_modules():
            self._observe(name, module, packed)
        return self

    def __exit__(self, *exc) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._stock_prepare is not None:
            self.runner.prepare_inputs = self._stock_prepare

    # Which rows of a batch are whose ----------------------------------------------------------------------------------

    def _follow_batches(self) -> None:
        """vLLM's newer model runner keeps the batch in a local variable of its step, so it is caught on the way there."""
        if hasattr(self.runner, "input_batch"):
            return
        self._stock_prepare = stock = self.runner.prepare_inputs

        def prepare_inputs(*args, **kwargs):
            self._v2_batch = stock(*args, **kwargs)
            return self._v2_batch

        self.runner.prepare_inputs = prepare_inputs

    def _layout(self) -> tuple[list[str], np.ndarray]:
        """Request ids in batch order, and where each one's rows start (one more entry than requests)."""
        if self._v2_batch is not None:
            ids = list(self._v2_batch.req_ids)
            return ids, np.asarray(self._v2_batch.query_start_loc_np[: len(ids) + 1])
        ids = [i for i in self.runner.input_batch.req_ids if i is not None]
        return ids, self.runner.query_start_loc.np[: len(ids) + 1]

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._table_seen = False
        ids, starts = self._layout()
        positions = kwargs["positions"].cpu() if "positions" in kwargs else args[1].cpu()
        rows, index, decode, last, last_index, last_decode = [], [], [], [], [], []
        for slot, request in enumerate(ids):
            sequence = self._sequence(request)
            if sequence is None:
                continue
            start, end = int(starts[slot]), int(starts[slot + 1])
            for row in range(start, end):
                key = (sequence, int(positions[row]))
                # A preempted request is computed again; its tokens were sampled from what was seen first.
                if key[1] >= self.limit or key in self._seen:
                    continue
                self._seen.add(key)
                rows.append(row)
                index.append(key)
                decode.append(end - start == 1)
                if row == end - 1:
                    last.append(slot)
                    last_index.append(key)
                    last_decode.append(end - start == 1)
        self._rows, self._last = torch.tensor(rows, dtype=torch.long), torch.tensor(last, dtype=torch.long)
        self._index, self._last_index = _pairs(index), _pairs(last_index)
        self._decode, self._last_decode = (
            torch.tensor(decode, dtype=torch.bool),
            torch.tensor(last_decode, dtype=torch.bool),
        )

    def _sequence(self, request: str) -> int | None:
        """vLLM appends a random part to the id that it was given."""
        return self.requests.get(request, self.requests.get(request.rpartition("-")[0]))

    # Where to look ----------------------------------------------------------------------------------------------------

    def _observe(self, name: str, module: nn.Module, packed: dict[str, list[str]]) -> None:
        parent, _, leaf = name.rpartition(".")
        if name == EMBEDDING:
            self._after(module, lambda out: self._emit(EMBEDDING, out))
        elif leaf.isdigit() and parent.endswith("layers"):
            self._hooks.append(module.register_forward_pre_hook(lambda m, a, layer=int(leaf): self._enter(layer)))
        elif name == FINAL_NORM or leaf in ("input_layernorm", "post_attention_layernorm"):
            self._after(module, lambda out: self._norm(name, out))
        elif leaf in packed:
            names = [f"{parent}.{part}" for part in packed[leaf]]
            self._after(module, lambda out: self._merged(names, module.output_partition_sizes, out))
        elif leaf == "rotary_emb":  # one object for all layers
            self._hooks.append(module.register_forward_pre_hook(self._table))
            self._after(module, lambda out: self._rotary(out))
        elif leaf == "attn":
            self._after(module, lambda out: self._emit(parent, out))
        elif leaf in ("o_proj", "down_proj", "q_norm", "k_norm", "act_fn"):
            self._after(module, lambda out: self._emit(name, _first(out)))
        elif leaf == "logits_processor":
            self._after(module, self._logits)

    def _after(self, module: nn.Module, see: Callable) -> None:
        self._hooks.append(module.register_forward_hook(lambda m, args, out: see(out)))

    def _enter(self, layer: int) -> None:
        self._layer = layer

    def _emit(self, point: str, out: torch.Tensor) -> None:
        if len(self._rows):
            tokens = out.reshape(out.shape[0], -1)
            self.store.add(point, self._index, tokens[self._rows.to(out.device)], self._decode)

    def _norm(self, name: str, out) -> None:
        if isinstance(out, tuple):
            self._emit(_residual_before(name, self._layer), out[1])
        self._emit(name, _first(out))

    def _merged(self, names: list[str], sizes: list[int], out) -> None:
        for name, part in zip(names, _first(out).split(list(sizes), dim=-1), strict=True):
            self._emit(name, part)

    def _table(self, module: nn.Module, args: tuple) -> None:
        """Once a forward: what every layer's call reads."""
        if not self._table_seen and len(self._rows):
            self._table_seen = True
            positions, query = args[:2]
            cache = module.cos_sin_cache
            self._emit(ROTARY_TABLE, cache[positions.flatten().to(cache.device)].to(query.dtype))

    def _rotary(self, out) -> None:
        for which, tensor in zip("qk", out, strict=True):
            self._emit(f"model.layers.{self._layer}.self_attn.rotary#{which}", tensor)

    def _logits(self, out: torch.Tensor) -> None:
        if len(self._last):
            self.store.add(LM_HEAD, self._last_index, out[self._last.to(out.device)], self._last_decode)


def _pairs(keys: list[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor(keys, dtype=torch.long).reshape(-1, 2)


def _first(out):
    """vLLM's linear layers return (output, bias)."""
    return out[0] if isinstance(out, tuple) else out


def _residual_before(norm: str, layer: int) -> str:
    """The residual sum that a norm's second output is."""
    if norm == FINAL_NORM:
        return f"model.layers.{layer}.mlp.residual_add"
    if norm.endswith("post_attention_layernorm"):
        return f"model.layers.{layer}.self_attn.residual_add"
    return f"model.layers.{layer - 1}.mlp.residual_add"
