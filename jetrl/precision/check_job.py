"""From a job's configuration to the checked pair of graphs, the verdict and the exit code."""

from dataclasses import dataclass

from jetrl.precision.architectures import load_config
from jetrl.precision.build_hf import build_inference_graph, build_training_graph, meta_model
from jetrl.precision.estimate import Estimate, estimate, saved_bytes
from jetrl.precision.flow import PrecisionAssignment
from jetrl.precision.graph import PrecisionGraph
from jetrl.precision.job import Job
from jetrl.precision.layout_rules import with_tensor_parallel
from jetrl.precision.render_table import Row, rows
from jetrl.precision.subgraph import Violation, check


@dataclass(frozen=True)
class Result:
    """Everything that the command prints, in any of its forms."""

    job: Job
    config_source: str
    infer: PrecisionGraph
    train: PrecisionGraph
    violations: list[Violation]
    rows: list[Row]
    estimate: Estimate

    @property
    def exit_code(self) -> int:
        """1 where the job claims a unified flow and does not have one."""
        return 1 if self.job.unified and self.violations else 0

    @property
    def unclassified(self) -> list[str]:
        return list(self.train.meta["unclassified"])

    @property
    def verdict(self) -> str:
        edges = len(self.infer.edges)
        if self.violations and self.job.unified:
            head = (
                f"VIOLATED: flow {self.job.flow} claims to be unified, but {len(self.violations)} violations were found"
            )
        elif self.violations:
            head = (
                f"not unified, as flow {self.job.flow} says: {len(self.violations)} violations among the rollout's "
                f"{edges} edges"
            )
        else:
            head = f"unified: all {edges} edges of the rollout's graph are in training's forward graph"
        if self.unclassified:
            head += f"; {len(self.unclassified)} modules could not be classified, and nothing is said about them"
        return head

    def to_dict(self) -> dict:
        return {
            "flow": self.job.flow,
            "unified": self.job.unified,
            "exit_code": self.exit_code,
            "verdict": self.verdict,
            "model": {"path": self.job.model_path, "config": self.config_source},
            "notes": list(self.job.notes),
            "operators": [vars(row) for row in self.rows],
            "violations": [v.to_dict() for v in self.violations],
            "unclassified": self.unclassified,
            "excluded": excluded(self.train, self.infer),
            "estimate": self.estimate.to_dict(),
            "digests": {"rollout": self.infer.digest(), "training": self.train.digest()},
        }


def check_job(job: Job) -> Result:
    """Builds both declared graphs on the meta device and compares them. Raises UserError for bad input."""
    config, source = load_config(job.model_path)
    model = meta_model(config)
    # Training first: shipped flows copy its keys to the rollout, so a bad pattern is named where the user wrote it.
    train = build_training_graph(model, job.train, carrier=job.train_carrier, master=job.master)
    infer = build_inference_graph(model, job.rollout, carrier=job.rollout_carrier, kv=job.rollout_kv)
    infer = with_tensor_parallel(infer, job.tensor_parallel)
    plain = build_training_graph(model, PrecisionAssignment(), carrier=job.train_carrier, master=job.master)
    saved = saved_bytes(train)
    return Result(
        job=job,
        config_source=source,
        infer=infer,
        train=train,
        violations=check(infer, train),
        rows=rows(infer, train, saved),
        estimate=estimate(infer, train, plain, job),
    )


def excluded(*graphs: PrecisionGraph) -> dict[str, dict[str, list[str]]]:
    """side -> reason -> the linears that it keeps unquantized: what each pattern really matched."""
    result: dict[str, dict[str, list[str]]] = {}
    for graph in graphs:
        reasons = result.setdefault(graph.meta["side"], {})
        for name, reason in graph.meta["kept_unquantized"].items():
            reasons.setdefault(reason, []).append(name)
    return result
