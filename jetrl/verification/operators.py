"""Which operators differ between the two engines, in the order of execution, and whether by themselves."""

from jetrl.verification.points import operator_of, point_order, title_of


def operator_report(plain, fed, layers: int) -> list[dict]:
    """One entry for every point of a model of `layers` layers that was seen.

    plain, fed: TrainerObservers after a forward as it is, and after one in which every operator reads the rollout's
    values. `seen`: the difference in the first; `own`: in the second.
    """
    entries = []
    for point in point_order(layers):
        if point not in plain.found:
            continue
        entries.append(
            {
                "point": point,
                "operator": operator_of(point),
                "title": title_of(point),
                "seen": plain.found[point].to_dict(),
                "own": fed.found[point].to_dict(),
            }
        )
    return entries


def first_difference(report: list[dict]) -> dict | None:
    """The first entry in the order of execution whose values differ; None where all bits are equal."""
    return next((entry for entry in report if entry["seen"]["differing"]), None)


def own_differences(report: list[dict]) -> list[dict]:
    """Entries that differ although they read the same input."""
    return [entry for entry in report if entry["own"]["differing"]]
