"""Before weights move: ask every vLLM worker which precision graph it runs, and compare with the trainer's.

Channel: VeRL names its rollout servers as Ray actors. Their `collective_rpc` drops the workers' answers, so rank 0 runs
two small functions inside the server (Ray's `__ray_call__`): one starts the RPC on the engine, one collects it. Rank 0
then broadcasts the verdict, so that all ranks stop together and none waits in a collective for the others.

It runs at every sync, not only the first: that is what notices a rollout server that was restarted in between.
"""

import asyncio
import re
import time
import uuid
from dataclasses import dataclass

import ray
import torch
from ray.util import list_named_actors

from jetrl.errors import JobError
from jetrl.integrations.protocol import REPORT_METHOD, announce, versions
from jetrl.integrations.verl.wire import FP8_WIRE, equal_weight_formats
from jetrl.precision.flow import Flow
from jetrl.precision.graph import PrecisionGraph
from jetrl.precision.subgraph import check
from jetrl.precision.violation import violation_sentence

TIMEOUT_SECONDS = 120.0
# vllm_server_<replica>_<node>: only node 0 of a replica has an engine to ask. Reward and teacher servers do not match.
_SERVER_NAME = re.compile(r"vllm_server_\d+_0\D*")


@dataclass(frozen=True)
class WorkerReport:
    """One worker's answer; `graph` in the wire form of PrecisionGraph.to_dict, None where the digest was known."""

    server: str
    rank: int
    process: str
    digest: str
    graph: dict | None
    versions: dict[str, str]
    wires: tuple[str, ...]  # forms in which this worker takes weights


class RolloutHandshake:
    """Held by the trainer's engine; remembers who answered so that an unchanged rollout costs one small RPC."""

    def __init__(self, flow: Flow, train_graph: PrecisionGraph) -> None:
        self.flow = flow
        self.train_graph = train_graph
        self._agreed: set[tuple[str, str]] = set()  # (process, digest) of every worker that passed
        self._graphs: dict[str, dict] = {}  # by digest
        # Layers whose weights may travel as FP8 -> their scale format: known on every rank once check() has returned.
        self.fp8_weights: dict[str, str] = {}
        # Of this run's weight syncs; rank 0's on every rank once check() has returned.
        self.sync_token = uuid.uuid4().hex[:12]

    def check(self) -> None:
        """Collective over all trainer ranks. Raises JobError where a worker differs or does not answer."""
        verdict: list = ["rank 0 failed while it compared precision graphs; the log has its error", {}, None]
        try:
            if torch.distributed.get_rank() == 0:
                self._compare(ask_rollout(list(self._graphs)))
                verdict = [None, self.fp8_weights, self.sync_token]
        except JobError as e:
            verdict[0] = str(e)
        finally:
            # Also where rank 0 fails in a way not foreseen: the others would wait for it until NCCL's time-out.
            torch.distributed.broadcast_object_list(verdict, src=0)
        if verdict[0] is not None:
            raise JobError(verdict[0])
        self.fp8_weights, self.sync_token = verdict[1:]

    def _compare(self, reports: list[WorkerReport]) -> None:
        self._graphs.update({r.digest: r.graph for r in reports if r.graph is not None})
        fresh = [r for r in reports if (r.process, r.digest) not in self._agreed]
        if not fresh:
            return
        self._compare_versions(fresh)
        digests = {r.digest for r in reports}
        if len(digests) > 1:
            shown = ", ".join(f"{r.server} rank {r.rank}: {r.digest[:12]}" for r in reports)
            raise JobError(f"the rollout workers run different precision graphs ({shown})")
        rollout_graph = PrecisionGraph.from_dict(self._graphs[fresh[0].digest])
        violations = check(rollout_graph, self.train_graph)
        if violations and self.flow.unified:
            raise JobError(violation_sentence(self.flow.name, violations))
        if violations:
            announce(
                f"flow {self.flow.name} is not unified: {len(violations)} edges of the rollout are not in the trainer's "
                f"forward graph:\n" + "\n".join(f"  {v}" for v in violations)
            )
        else:
            announce(
                f"flow {self.flow.name}: the rollout's precision graph {fresh[0].digest[:12]} is a subgraph of the "
                f"trainer's ({len(reports)} rollout workers)"
            )
        self._agreed = {(r.process, r.digest) for r in reports}
        takes_fp8 = all(FP8_WIRE in r.wires for r in reports)
        self.fp8_weights = equal_weight_formats(rollout_graph, self.train_graph) if takes_fp8 else {}

    @staticmethod
    def _compare_versions(reports: list[WorkerReport]) -> None:
        mine = versions()
        for r in reports:
            for name, version in mine.items():
                if r.versions.get(name) != version:
                    raise JobError(
                        f"{r.server} rank {r.rank} runs {name} {r.versions.get(name)} but the trainer runs {version}; "
                        f"use one environment for both"
                    )


def ask_rollout(known_digests: list[str]) -> list[WorkerReport]:
    """Every worker of every rollout server of this Ray namespace. Raises JobError when one does not answer."""
    names = sorted(name for name in list_named_actors() if _SERVER_NAME.fullmatch(name))
    if not names:
        raise JobError("no vLLM rollout server was found to compare precision graphs with")
    reports = []
    for name in names:
        for answer in _ask_server(name, known_digests):
            reports.append(WorkerReport(server=name, **answer))
    return reports


def _ask_server(name: str, known_digests: list[str]) -> list[dict]:
    server = ray.get_actor(name)
    try:
        ray.get(server.__ray_call__.remote(_start_report, REPORT_METHOD, known_digests), timeout=TIMEOUT_SECONDS)
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            answers = ray.get(server.__ray_call__.remote(_collect_report), timeout=TIMEOUT_SECONDS)
            if answers is not None:
                return answers
            time.sleep(0.02)
    except ray.exceptions.RayError as e:
        raise JobError(
            f"{name} could not tell which precision graph it runs ({last_line(e)}); is jetrl's vLLM plug-in installed in the "
            f"rollout's environment and allowed by VLLM_PLUGINS?"
        ) from e
    raise JobError(f"{name} did not tell within {TIMEOUT_SECONDS:.0f} s which precision graph it runs")


def last_line(error: Exception) -> str:
    """The last line of what a remote call raised, or its type where it has no text (an assert without a message)."""
    cause = getattr(error, "cause", None) or error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[-1]


def _start_report(server, method: str, known_digests: list[str]) -> None:
    """Runs inside the rollout server, in a thread of its own; the engine lives in the event loop of its output handler."""
    loop = server.engine.output_handler.get_loop()
    server.jetrl_report = asyncio.run_coroutine_threadsafe(
        server.engine.collective_rpc(method=method, args=(known_digests,)), loop
    )


def _collect_report(server) -> list[dict] | None:
    """The workers' answers, None while they are not all there; re-raises what a worker raised."""
    if not server.jetrl_report.done():
        return None
    return server.jetrl_report.result()
