"""The answer of jetrl.verify for people."""

from jetrl.verification.operators import first_difference, own_differences
from jetrl.verification.points import kind_of, layer_of
from jetrl.verification.workspace import Options


def failures(result: dict, options: Options) -> list[str]:
    """One sentence for every bound that is exceeded."""
    figures, found = result["mismatch"]["all"], []
    if not figures["k3_kl"] <= (options.max_kl if options.max_kl is not None else float("inf")):
        found.append(f"k3 KL {figures['k3_kl']:.3g} is above --max-kl {options.max_kl:g}")
    if is_exact(result) and figures["differing_tokens"]:
        found.append(f"{figures['differing_tokens']} tokens differ, and {result['flow']['name']} is an exact flow")
    found += [
        f"the mutation of {m['operator']} in the {m['side']} ({m['what']}) was not found: {m['verdict']}"
        for m in result.get("mutations", [])
        if m["found"] is False
    ]
    return found


def is_exact(result: dict) -> bool:
    """True where the flow promises the same bits on both sides."""
    return bool(result["flow"]["train"].get("exact") and result["flow"]["rollout"].get("exact"))


def report_lines(result: dict) -> list[str]:
    engine = result["engine"]
    lines = [
        "",
        f"{result['device']}, flow {result['flow']['name']}, trainer's attention {result['attention']}, rollout "
        f"{'eager' if engine['enforce_eager'] else 'with CUDA graphs'}, up to {engine['largest_batch']} sequences at once, "
        f"{engine['preemptions']} preemptions",
        "",
        *_mismatch_table(result["mismatch"]),
    ]
    if is_exact(result):
        lines += [
            f"sequence {f['sequence']}, output token {f['position']}: {f['rollout']!r} in the rollout, {f['trainer']!r} in the trainer"
            for f in result["mismatch"]["first_differing"]
        ]
    report = result.get("operators")
    if report:
        lines += ["", *_operator_lines(report, result), *_not_followed(result)]
    lines += [_mutation_line(m) for m in result.get("mutations", [])]
    lines += ["", *(result["failures"] or ["no bound exceeded"])]
    return lines


def _mutation_line(m: dict) -> str:
    found = {True: "found", False: "NOT FOUND", None: "no verdict"}[m["found"]]
    return f"mutation in the {m['side']}, {m['operator']} ({m['what']}): {found}; {m['verdict']}"


def _mismatch_table(mismatch: dict) -> list[str]:
    head = f"{'output tokens':>14} {'tokens':>8} {'differ':>8} {'k3 KL':>10} {'|Δ| p50':>10} {'p99':>10} {'max':>10} {'prob error':>11}"
    rows = [(f"{b['from']} to {b['to'] - 1}", b) for b in mismatch["by_position"]]
    return [head, *(_row(name, b) for name, b in [*rows, ("all", mismatch["all"])])]


def _row(name: str, b: dict) -> str:
    return (
        f"{name:>14} {b['tokens']:>8} {b['differing_tokens']:>8} {b['k3_kl']:>10.3g} {b['abs_logprob_diff_p50']:>10.3g} "
        f"{b['abs_logprob_diff_p99']:>10.3g} {b['abs_logprob_diff_max']:>10.3g} {b['token_mult_prob_error']:>11.6f}"
    )


def _operator_lines(report: list[dict], result: dict) -> list[str]:
    first, own = first_difference(report), own_differences(report)
    rows = report[0]["seen"]["rows"]
    if first is None:
        lines = [f"operators: all bits equal at {len(report)} points, {rows} tokens"]
        if result["mismatch"]["all"]["differing_tokens"] and not result["engine"]["enforce_eager"]:
            lines.append(
                "the operators were observed in an eager rollout: what differs comes from the compiled graph or from batching"
            )
        return lines
    lines = [f"first difference: {first['operator']} {first['title']}, {_sizes(first['seen'])}"]
    if not own:
        return [*lines, "no operator differs when it reads the rollout's values"]
    lines += ["", f"operators that differ by themselves (reading the rollout's values, {rows} tokens):"]
    kinds: dict[str, list[dict]] = {}
    for entry in own:
        kinds.setdefault(kind_of(entry["point"]), []).append(entry)
    for kind, entries in kinds.items():
        worst = max(entries, key=lambda e: e["own"]["differing"])
        layers = [layer_of(e["point"]) for e in entries if layer_of(e["point"]) is not None]
        where = f" in {len(layers)} layers, most in layer {layer_of(worst['point'])}" if layers else ""
        lines.append(f"  {kind} ({worst['title']}){where}: {_sizes(worst['own'])}")
    if any(e["point"].endswith("self_attn") for e in own) and not result["engine"]["enforce_eager"]:
        lines.append(
            "  (observed in an eager rollout; where attention_config asks for splits of a decode's keys, FA3 chooses their number "
            "there by itself)"
        )
    equal = len(report) - len(own)
    return [*lines, f"  the other {equal} of {len(report)} points: all bits equal"]


def _not_followed(result: dict) -> list[str]:
    """Attention, for one, takes another kernel for long sequences: an operator may differ only where none was followed."""
    followed = result["followed_tokens"]
    longest = max(p + o for p, o in zip(result["prompt_lengths"], result["output_lengths"], strict=True))
    if longest <= followed or not result["mismatch"]["all"]["differing_tokens"]:
        return []
    return [
        f"sequences of up to {longest} tokens were followed over the first {followed}: see further with --layer-tokens"
    ]


def _sizes(d: dict) -> str:
    share = 100 * d["differing"] / d["values"]
    where = f"{d['prefill_rows']} prefill and {d['decode_rows']} decode tokens"
    return f"{share:.3g} % of values, max {d['max_abs']:.2g}, max relative {d['max_relative']:.1e}, {where}"
