"""Runs that differ in nothing but a seed form one group: one curve, one band, one row.

Everything else separates: the flow, and every other configuration key that is not a name, a path or a seed.
"""

import itertools
from dataclasses import dataclass, replace

from jetrl.reporting.runs import Run

NO_FLOW = "flow not recorded"
LABEL = 31  # characters; what a legend shows whole, with the number of seeds behind it
BASELINE = "bf16"
_ORDER = ("bf16", "fp8_rollout", "fp8_vllm", "unified_fp8", "unified_fp8_pow2", "unified_exact")
_LABELS = ("run.", "choices.", "resume", "prepare_data", "trainer.experiment_name", "trainer.project_name")
_LABELS += ("trainer.default_local_dir", "trainer.resume_", "data.train_files", "data.val_files")
_LABELS += ("ray_kwargs.", "actor_rollout_ref.rollout.trace.", "actor_rollout_ref.rollout.prometheus.")
# jetrl_gemm repeats the key `gemm` for a rollout with FP8 linears; one without them has no such key.
_FLOW_WORDS = ("jetrl_flow", "jetrl_gemm", "engine_kwargs.vllm.quantization", "rollout.quantization")
# How often a job looks and saves does not change what it learns.
_WATCHING = ("trainer.save_freq", "trainer.test_freq", "trainer.logger", "trainer.val_before_train")
# What two runs must share for their accuracies to be comparable.
_PROBLEM = ("actor_rollout_ref.model.path", "task.", "data.max_prompt_length", "data.max_response_length")


@dataclass(frozen=True)
class Group:
    """label: the flow, and what else sets it apart from another group of that flow. seeds: one word per run.

    style: number of the group's colour and dash in every picture; a flow has the same in every report.
    """

    label: str
    flow: str | None
    runs: tuple[Run, ...]
    seeds: tuple[str, ...]
    style: int = 0


def is_seed(key: str) -> bool:
    last = key.rpartition(".")[2]
    return last == "seed" or last.endswith("_seed")


def is_label(key: str) -> bool:
    """Names, paths and machine settings: different in every run, without a meaning for the result."""
    return key.startswith(_LABELS)


def matters(key: str) -> bool:
    """Whether two runs that differ in `key` are two settings and not two seeds of one."""
    return not (is_label(key) or is_seed(key) or key in _WATCHING)


def is_flow(key: str) -> bool:
    return key.startswith("flow.") or any(word in key for word in _FLOW_WORDS)


def flow_name(run: Run) -> str | None:
    return run.flat.get("flow.name")


def group_runs(runs: list[Run]) -> list[Group]:
    """Groups in the order bf16, FP8 rollouts, unified flows, then the others as they were given."""
    members: dict[tuple, list[Run]] = {}
    for run in runs:
        members.setdefault(_signature(run), []).append(run)
    flows = {key: flow_name(rows[0]) for key, rows in members.items()}
    groups, used = [], {}
    for key, rows in members.items():
        rivals = [members[other][0] for other, flow in flows.items() if flow == flows[key] and other != key]
        label = _label(flows[key], rows[0], rivals)
        used[label] = used.get(label, 0) + 1
        label = label if used[label] == 1 else f"{label} #{used[label]}"
        groups.append(Group(label, flows[key], tuple(rows), _seeds(rows)))
    rank = {name: place for place, name in enumerate(_ORDER)}
    return _styled(sorted(groups, key=lambda g: rank.get(g.flow, len(rank) + (g.flow is None))))


def _styled(groups: list[Group]) -> list[Group]:
    spare, taken, result = itertools.count(len(_ORDER)), set(), []
    for group in groups:
        known = group.flow in _ORDER and group.flow not in taken
        taken.add(group.flow)
        result.append(replace(group, style=_ORDER.index(group.flow) if known else next(spare)))
    return result


def baseline_of(group: Group, groups: list[Group]) -> Group | None:
    """The BF16 group on the same model, task and lengths; of several, the one with the fewest different keys."""
    own = group.runs[0].flat
    candidates = []
    for other in groups:
        theirs = other.runs[0].flat
        if other.flow == BASELINE and own and _problem(own) == _problem(theirs):
            candidates.append((len(different_keys([own, theirs])), other))
    return min(candidates, key=lambda pair: pair[0])[1] if candidates else None


def different_keys(configs: list[dict[str, object]]) -> list[str]:
    """Keys, names and seeds and the flow aside, that are not the same in all `configs`."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [
        key
        for key in keys
        if matters(key) and not is_flow(key) and any(config.get(key) != configs[0].get(key) for config in configs)
    ]


def _problem(config: dict[str, object]) -> dict[str, str]:
    return {key: str(value) for key, value in config.items() if key.startswith(_PROBLEM) and not is_seed(key)}


def _signature(run: Run) -> tuple:
    if run.cfg is None:
        # Nothing says that two plain VeRL jobs are seeds of one experiment, so they are never averaged.
        return (str(run.path),)
    return tuple(sorted((k, str(v)) for k, v in run.flat.items() if matters(k)))


def _label(flow: str | None, run: Run, rivals: list[Run]) -> str:
    """The flow's name and, beside rivals of the same flow, the fewest and shortest words that no rival shares."""
    if flow is None:
        return _cut_middle(run.name, LABEL)
    tells_from: dict[str, set[int]] = {}
    for number, rival in enumerate(rivals):
        for key in {*run.flat, *rival.flat}:
            derived = "jetrl_flow" in key  # the wire form repeats flow.*
            if run.flat.get(key) != rival.flat.get(key) and matters(key) and not derived:
                word = f"{key.rpartition('.')[2]}={run.flat.get(key)}"
                tells_from.setdefault(word, set()).add(number)
    label, joint, left = flow, " · ", set(range(len(rivals)))
    while left:
        word = min(tells_from, key=lambda word: (-len(tells_from[word] & left), len(word), word))
        room = LABEL - len(label) - len(joint)
        if not tells_from[word] & left or (joint == ", " and len(word) > room):
            break
        label, joint, left = f"{label}{joint}{_cut_middle(word, max(room, 8))}", ", ", left - tells_from[word]
    return label


def _cut_middle(text: str, most: int) -> str:
    """Names in a list are often alike at the beginning and differ at the end."""
    return (
        text if len(text) <= most else f"{text[: (most - 1) // 3]}…{text[len(text) - (most - 1 - (most - 1) // 3) :]}"
    )


def _seeds(rows: list[Run]) -> tuple[str, ...]:
    configs = [run.flat for run in rows]
    keys = [k for k in configs[0] if is_seed(k) and any(c.get(k) != configs[0].get(k) for c in configs)]
    keys = keys or [k for k in ("task.seed",) if k in configs[0]]
    # Several seed keys that always move together need one number, not three.
    return tuple("/".join(dict.fromkeys(str(c.get(k)) for k in keys)) or "-" for c in configs)
