"""Observes the trainer's module during one forward, and can feed every operator the rollout's own input.

Feeding works in place: after an operator's output has been compared, it is overwritten with the rollout's output at that
point, so whatever reads it next computes from the rollout's values. An operator that then still differs does so by
itself; one that only differs without the feeding has inherited it.

Stock modules are seen through hooks, attention through transformers' attention interface, fused layers through the names
they announce (jetrl.fusion.trace) and the jetrl ops that run meanwhile.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jetrl_kernels.constants import TILE, pad_to_tile
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jetrl.fusion import trace
from jetrl.linear import quantize_input
from jetrl.verification.compare import Difference, difference, quantized_difference
from jetrl.verification.perturb import normed
from jetrl.verification.points import EMBEDDING, FINAL_NORM, LM_HEAD, ROTARY_TABLE, PointRows

# What FSDP and activation checkpointing put into a module's name.
_WRAPPERS = re.compile(r"(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod)\.")
_LINEARS = re.compile(r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)")
_LAYER = re.compile(r"model\.layers\.(\d+)")
# What a fused layer names its call of transformers' attention interface, which is watched there.
ATTENTION = ("self_attn",)


@dataclass(frozen=True)
class TokenLayout:
    """Where a token's row is. lengths: of the sequences of the forward; packed: one after the other, else padded to the
    longest, a sequence a line."""

    lengths: tuple[int, ...]
    packed: bool

    @property
    def shape(self) -> tuple[int, int]:
        return (1, sum(self.lengths)) if self.packed else (len(self.lengths), max(self.lengths))

    def places(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Line and column of every (sequence, position) of index (R, 2)."""
        sequence, position = index.unbind(1)
        if not self.packed:
            return sequence, position
        starts = torch.tensor([0, *self.lengths]).cumsum(0)
        return torch.zeros_like(sequence), starts[sequence] + position


def canonical_names(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every submodule with its Hugging Face path."""
    return [(m, _WRAPPERS.sub("", name)) for name, m in module.named_modules()]


class TrainerObserver:
    """Context manager. rollout: the rollout's rows by point; feed: overwrite with them; mutation: see mutations_trainer.py.
    After a forward, `found` holds a Difference for every point that both engines showed, `prints` a checksum of the
    trainer's own values there."""

    def __init__(
        self, module: nn.Module, layout: TokenLayout, rollout: dict[str, PointRows], feed: bool, mutation=None
    ) -> None:
        self.module, self.layout, self.rollout, self.feed = module, layout, rollout, feed
        self.found: dict[str, Difference] = {}
        self.prints: dict[str, int] = {}
        self._hooks: list = []
        self._names = {id(m): name for m, name in canonical_names(module)}
        self._attention: dict[str, Callable] = {}
        self._fused = _FusedSteps(self, mutation)
        self._layer = ""

    def __enter__(self) -> "TrainerObserver":
        fused = tuple(f"{self._names[id(m)]}." for m in self.module.modules() if hasattr(m, "jetrl_steps"))
        for module in self.module.modules():
            name = self._names[id(module)]
            if not name.startswith(fused):  # a fused layer does not call its children, and refuses hooks on them
                self._observe(name, module)
        for name in list(ALL_ATTENTION_FUNCTIONS):
            self._attention[name] = stock = ALL_ATTENTION_FUNCTIONS[name]
            ALL_ATTENTION_FUNCTIONS[name] = self._watched_attention(stock)
        trace.listen(self._fused)
        return self

    def __exit__(self, *exc) -> None:
        trace.listen(None)
        for name, stock in self._attention.items():
            ALL_ATTENTION_FUNCTIONS[name] = stock
        for hook in self._hooks:
            hook.remove()

    # What is seen -----------------------------------------------------------------------------------------------------

    def see(self, point: str, out: torch.Tensor) -> None:
        """out: any shape whose leading dimensions are the tokens (lines x columns, or flat). Overwritten when feeding."""
        theirs = self.rollout.get(point)
        if theirs is None or point in self.found or not len(theirs.index):
            return
        rows = _Rows(out, self.layout, theirs.index)
        mine = rows.read()
        data = theirs.data.to(mine.device)
        if data.shape != mine.shape:
            raise ValueError(f"{point}: {tuple(data.shape)} in the rollout and {tuple(mine.shape)} in the trainer")
        self._keep(point, difference(data, mine, theirs.decode.to(mine.device)), mine)
        if self.feed:
            rows.write(data)

    def see_table(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """cos, sin (lines or 1, columns, R), both halves of a row equal: one table may serve all lines."""
        theirs = self.rollout.get(ROTARY_TABLE)
        if theirs is None or ROTARY_TABLE in self.found or not len(theirs.index):
            return
        line, column = (t.to(cos.device) for t in self.layout.places(theirs.index))
        line, half = (line if cos.shape[0] > 1 else torch.zeros_like(line)), cos.shape[-1] // 2
        mine = torch.cat([t[line, column, :half] for t in (cos, sin)], dim=-1)
        data = theirs.data.to(mine.device)
        self._keep(ROTARY_TABLE, difference(data, mine, theirs.decode.to(mine.device)), mine)
        if self.feed:
            for table, part in zip((cos, sin), data.to(cos.dtype).chunk(2, dim=-1), strict=True):
                table[line, column] = torch.cat((part, part), dim=-1)

    def differs(self, *points: str) -> bool:
        """Whether any of them was seen with other values than the rollout's."""
        return any(p in self.found and not self.found[p].equal for p in points)

    def see_tiles(self, point: str, codes: torch.Tensor, scale: torch.Tensor, scale_format: str) -> None:
        """A point whose output leaves the trainer's kernel quantized: the rollout's is quantized by the shared quantizer."""
        theirs = self.rollout.get(point)
        if theirs is None or point in self.found or not len(theirs.index):
            return
        data = quantize_input(theirs.data.to(codes.device), scale_format)
        raw = codes.view(torch.uint8)
        rows = [_Rows(t, self.layout, theirs.index) for t in (raw, scale)]
        mine = rows[0].read().view(codes.dtype), rows[1].read()
        self._keep(point, quantized_difference(data, mine, theirs.decode.to(codes.device)), *mine)
        if self.feed:
            rows[0].write(data[0].view(torch.uint8))
            rows[1].write(data[1])

    def see_result(self, point: str, mine: torch.Tensor) -> None:
        """A point whose rows are at hand already, in the rollout's order."""
        theirs = self.rollout[point]
        self._keep(point, difference(theirs.data, mine, theirs.decode), mine)

    def _keep(self, point: str, found: Difference, *mine: torch.Tensor) -> None:
        self.found[point] = found
        self.prints[point] = hash(tuple(_checksum(t) for t in mine))

    # Stock modules ----------------------------------------------------------------------------------------------------

    def _observe(self, name: str, module: nn.Module) -> None:
        leaf = name.rpartition(".")[2]
        if _LAYER.fullmatch(name):
            self._hooks.append(module.register_forward_pre_hook(lambda m, args: self._enter_layer(name, args)))
        elif name == FINAL_NORM or leaf in ("input_layernorm", "post_attention_layernorm"):
            before = self._residual_before(name)
            if before is not None:
                self._hooks.append(module.register_forward_pre_hook(lambda m, args: self.see(before, args[0])))
            self._after(name, module)
        elif name == ROTARY_TABLE:
            self._hooks.append(module.register_forward_hook(lambda m, args, out: self.see_table(*out)))
        elif name in (EMBEDDING, LM_HEAD) or leaf in ("q_norm", "k_norm") or _LINEARS.fullmatch(name):
            if leaf == "down_proj":  # gate and up are multiplied outside any module
                act = name.removesuffix("down_proj") + "act_fn"
                self._hooks.append(module.register_forward_pre_hook(lambda m, args: self.see(act, args[0])))
            self._after(name, module)

    def _after(self, name: str, module: nn.Module) -> None:
        def hook(m, args, out):
            if isinstance(out, torch.Tensor):
                self.see(name, out)

        self._hooks.append(module.register_forward_hook(hook))

    def _enter_layer(self, name: str, args: tuple) -> None:
        self._layer = name
        self._fused.layer = name

    def _residual_before(self, norm: str) -> str | None:
        if norm == FINAL_NORM:
            last = max(int(m[1]) for n in self._names.values() if (m := _LAYER.fullmatch(n)))
            return f"model.layers.{last}.mlp.residual_add"
        return residual_before(norm)

    def _watched_attention(self, stock: Callable) -> Callable:
        def attention(module, query, key, value, *args, **kwargs):
            name = self._names.get(id(module))
            if name is None:
                return stock(module, query, key, value, *args, **kwargs)
            self.see(f"{name}.rotary#q", query.transpose(1, 2))
            self.see(f"{name}.rotary#k", key.transpose(1, 2))
            out = stock(module, query, key, value, *args, **kwargs)
            self.see(name, out[0])
            return out

        return attention


def residual_before(norm: str) -> str | None:
    """The residual sum that a layer's norm reads; None for the first one, which reads the embedding."""
    layer, _, leaf = norm.rpartition(".")
    if leaf == "post_attention_layernorm":
        return f"{layer}.self_attn.residual_add"
    number = int(_LAYER.fullmatch(layer)[1])
    return f"model.layers.{number - 1}.mlp.residual_add" if number else None


class _FusedSteps(TorchDispatchMode):
    """Listens to a fused layer: between enter and leave, the jetrl ops that run are these children's work.

    As a dispatch mode it is active only meanwhile, and not in attention: FA3's operator cannot be called under one.
    """

    def __init__(self, observer: TrainerObserver, mutation) -> None:
        super().__init__()
        self.observer, self.mutation, self.layer = observer, mutation, ""
        self._names: list[tuple[str, ...]] = []
        self._ran: list[list[tuple[str, tuple, object]]] = []

    def enter(self, names: tuple[str, ...]) -> None:
        self._names.append(names)
        self._ran.append([])
        if names != ATTENTION:
            TorchDispatchMode.__enter__(self)

    def leave(self) -> None:
        # Only now: a bias is added to a GEMM's output in place.
        names, ran = self._names.pop(), self._ran.pop()
        if names != ATTENTION:
            TorchDispatchMode.__exit__(self, None, None, None)
        for op, args, out in ran:
            self._see(names, op, args, out)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        op = func._schema.name.removeprefix("jetrl::")
        here = self._names[-1] if self._names and op != func._schema.name else ()
        out = None
        if here and self.mutation is not None:
            out = self.mutation.replaced([f"{self.layer}.{name}" for name in here], op, func, args)
        if out is None:
            out = func(*args, **(kwargs or {}))
        if here:
            out = self._fed_inside(op, func, args, out)
            if op == "gemm_nt" and len(here) == 1 and self._is_ragged(here[0]):
                self._see(here, op, args, out)  # its padded columns are cut off in a copy before `leave`
            else:
                self._ran[-1].append((op, args, out))
        return out

    def _fed_inside(self, op: str, func, args: tuple, out):
        """A fused kernel's second half reads its first half's result: where that one is not the rollout's, and the rollout's
        is fed, the second half is computed again from it. So each half differs by itself or not."""
        observer, layer = self.observer, self.layer
        if op in ("rms_norm", "rms_norm_quantize") and args[1] is not None:
            *_, hidden, _ = out
            before = f"{layer}.self_attn.residual_add"
            observer.see(before, hidden)
            if observer.feed and observer.differs(before):
                *again, _, rstd = func(hidden, None, *args[2:])
                return (*again, hidden, rstd)
        elif op == "qk_norm_rotary":
            names = [f"{layer}.self_attn.{which}_norm" for which in "qk"]
            heads = [normed(x, rstd[..., None], w) for x, rstd, w in zip(args[:2], out[2:], args[2:4], strict=True)]
            for name, x in zip(names, heads, strict=True):
                observer.see(name, x)
            if observer.feed and observer.differs(*names):
                return (*torch.ops.jetrl.rotary(*heads, *args[5:], False), *out[2:])
        return out

    def _is_ragged(self, name: str) -> bool:
        rows = self.observer.rollout.get(f"{self.layer}.{name}")
        return rows is not None and rows.data.shape[1] % TILE != 0

    def _see(self, names: tuple[str, ...], op: str, args: tuple, out) -> None:
        see, full = self.observer.see, [f"{self.layer}.{name}" for name in names]
        norm = next((n for n in full if n.endswith("layernorm")), None)
        if op in ("rms_norm", "rms_norm_quantize") and norm is not None:
            before = residual_before(norm)
            if before is not None:  # a sum that the norm only reads; one that it forms was seen with it
                see(before, args[0] if args[1] is None else out[-2])
            if op == "rms_norm":
                see(norm, out[0])
            else:
                self.observer.see_tiles(norm, out[0], out[1], args[4])
        elif op == "gemm_nt":
            self._linears([n for n in full if _LINEARS.fullmatch(n)], out)
        elif op in ("rotary", "qk_norm_rotary"):
            see(f"{self.layer}.self_attn.rotary#q", out[0])
            see(f"{self.layer}.self_attn.rotary#k", out[1])
        elif op == "silu_mul":
            see(f"{self.layer}.mlp.act_fn", out)
        elif op == "silu_mul_quantize":
            self.observer.see_tiles(f"{self.layer}.mlp.act_fn", out[0], out[1], args[2])

    def _linears(self, names: list[str], out: torch.Tensor) -> None:
        """Every logical matrix starts at a multiple of 128 columns of a merged output."""
        start = 0
        for name in names:
            rows = self.observer.rollout.get(name)
            if rows is None:
                return
            width = rows.data.shape[1]
            self.observer.see(name, out[:, start : start + width])
            start += pad_to_tile(width)


class _Rows:
    """The rows of chosen tokens in a tensor, whatever its leading dimensions look like."""

    def __init__(self, tensor: torch.Tensor, layout: TokenLayout, index: torch.Tensor) -> None:
        lines, columns = layout.shape
        line, column = (t.to(tensor.device) for t in layout.places(index))
        self.count = len(index)
        if tensor.dim() > 2 and tuple(tensor.shape[:2]) == (lines, columns):
            self.view, self.at = tensor, (line, column)
        elif tensor.shape[0] == lines * columns:
            self.view, self.at = tensor, (line * columns + column,)
        elif tensor.shape[0] % (lines * columns) == 0 and tensor.is_contiguous():  # a row for every head
            self.view, self.at = tensor.view(lines * columns, -1), (line * columns + column,)
        else:
            raise ValueError(f"no tokens in a tensor of shape {tuple(tensor.shape)} for {lines} x {columns} tokens")

    def read(self) -> torch.Tensor:
        return self.view[self.at].reshape(self.count, -1)

    def write(self, data: torch.Tensor) -> None:
        self.view[self.at] = data.view(self.count, *self.view.shape[len(self.at) :]).to(self.view.dtype)


def _checksum(tensor: torch.Tensor) -> int:
    """Equal bytes, equal number; a weighted sum, so that two swapped values change it."""
    raw = tensor.contiguous().view(torch.uint8).flatten().to(torch.int64)
    return int((raw * (torch.arange(raw.numel(), device=raw.device) % 65521 + 1)).sum())
