"""The self-test: change how one operator of one engine computes, and see that the comparison names exactly that one.

In the trainer a mutation is applied to the forward that reads the rollout's values; in the rollout to a short sampling of its
own, which the unchanged trainer then reads: in unified flows alone, because elsewhere any operator may differ, and which do
depends on the data. An operator of which both engines do not have the same bits to begin with has no verdict there.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from jetrl.verification.points import FINAL_NORM, LM_HEAD, LOG_SOFTMAX, ROTARY_TABLE, operator_of


@dataclass(frozen=True)
class Mutation:
    """operator: canonical name of the one that computes otherwise; what: in words; kind: how, for the two sides."""

    operator: str
    what: str
    kind: str

    @property
    def layer(self) -> str:
        """`model.layers.N`, or nothing for what lies outside the layers."""
        parts = self.operator.split(".")
        return ".".join(parts[:3]) if parts[:2] == ["model", "layers"] else ""


def mutations_of(layers: int, head_norms: bool) -> list[Mutation]:
    """One or more of every shared operator, in the middle of so many decoder layers."""
    layer = f"model.layers.{layers // 2}"
    q_norm = [Mutation(f"{layer}.self_attn.q_norm", "squares summed in four rounded parts", "norm_parts")]
    return [
        Mutation(ROTARY_TABLE, "one cosine off by one place of BF16", "table"),
        Mutation(f"{layer}.input_layernorm", "squares summed in four rounded parts", "norm_parts"),
        *(q_norm if head_norms else ()),
        Mutation(f"{layer}.self_attn.rotary", "rounded once instead of three times", "rotary"),
        Mutation(f"{layer}.self_attn", "keys in two parts, merged after rounding", "attention"),
        Mutation(f"{layer}.self_attn.o_proj", "one weight scale off by 1/256, or the sum split in two", "linear"),
        Mutation(f"{layer}.self_attn.o_proj", "its input quantized with the other scale format", "quantizer"),
        Mutation(f"{layer}.self_attn.residual_add", "one value of each sum off by one place", "residual"),
        Mutation(f"{layer}.post_attention_layernorm", "rounded once instead of twice", "norm"),
        Mutation(f"{layer}.mlp.act_fn", "rounded once, or three times, instead of twice", "silu"),
        Mutation(FINAL_NORM, "squares summed in four rounded parts", "norm_parts"),
        Mutation(LM_HEAD, "the sum split in two", "head"),
        Mutation(LOG_SOFTMAX, "the sum over the vocabulary in two halves", "log_softmax"),
        Mutation(LOG_SOFTMAX, "the temperature off by 1/256", "temperature"),
        Mutation(LOG_SOFTMAX, "the vocabulary masked from its middle on", "mask"),
    ]


def mutations_of_module(module: nn.Module) -> list[Mutation]:
    """`mutations_of` for a Hugging Face causal LM."""
    head_norms = any(name.endswith("self_attn.q_norm") for name, _ in module.named_modules())
    return mutations_of(module.config.num_hidden_layers, head_norms)


def run_trainer(mutations: list[Mutation], observe: Callable[[Mutation], object | None], baseline) -> list[dict]:
    """Repeat the fed forward with each mutation. found: the mutated operator's own values changed, and no other's did.

    observe: a TrainerObserver after a fed forward under the mutation, None where the trainer has no such operator of its
    own; baseline: the one without a mutation. A point's own values are what the trainer computes from the rollout's, so a
    change at one point does not spread.
    """
    results = []
    for mutation in mutations:
        if not any(operator_of(p) == mutation.operator for p in baseline.found):
            results.append(_result("trainer", mutation, None, "not observed"))
            continue
        observer = observe(mutation)
        if observer is None:
            results.append(
                _result("trainer", mutation, None, "the trainer does not compute it so that it can be changed")
            )
            continue
        changed = [p for p, mark in observer.prints.items() if mark != baseline.prints[p]]
        named = list(dict.fromkeys(map(operator_of, changed)))
        # An operator of another kernel to begin with may come to equal the rollout's: changed it has.
        apart = any(not observer.found[p].equal or not baseline.found[p].equal for p in changed)
        results.append(
            _result("trainer", mutation, named == [mutation.operator] and apart, _sizes(changed, observer), named)
        )
    return results


def judge_rollout(mutation: Mutation, observer, baseline) -> dict:
    """found: the mutated operator, and no other, differs by itself from the rollout, where it did not before.

    observer, baseline: TrainerObservers after fed forwards of the unchanged trainer over what the mutated rollout computed,
    and over what the unchanged one did.
    """
    before = {p for p, d in baseline.found.items() if not d.equal}
    own = [p for p in baseline.found if operator_of(p) == mutation.operator]
    if not own:
        return _result("rollout", mutation, None, "not observed")
    if before & set(own):
        return _result("rollout", mutation, None, "not shared in this flow: it differs without a mutation")
    points = [p for p, d in observer.found.items() if not d.equal and p not in before]
    named = list(dict.fromkeys(map(operator_of, points)))
    return _result("rollout", mutation, named == [mutation.operator], _sizes(points, observer), named)


def not_applied(side: str, mutation: Mutation, why: str) -> dict:
    return _result(side, mutation, None, why)


def _sizes(points: list[str], observer) -> str:
    shown = [f"{p} ({100 * observer.found[p].share:.3g} % of values)" for p in points]
    return f"named {', '.join(shown) or 'nothing'}"


def _result(side: str, mutation: Mutation, found: bool | None, verdict: str, named: list[str] = ()) -> dict:
    """One row of the report; found is None where there was nothing to find."""
    return {
        "side": side,
        "operator": mutation.operator,
        "kind": mutation.kind,
        "what": mutation.what,
        "named": list(named),
        "found": found,
        "verdict": verdict,
    }
