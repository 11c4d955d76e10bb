"""The rollout's process: `python -m jetrl.verification.rollout <folder> generate|layers`.

generate: vLLM with the job's own engine settings samples the sequences; where these settings are eager, the operators are
observed on the way. layers: an eager engine samples the observed sequences again, for jobs whose engine runs CUDA graphs,
inside which nothing can be observed.
"""

import argparse
import sys
from dataclasses import fields
from pathlib import Path

import torch

from jetrl.errors import JobError, UserError
from jetrl.launch import preflight
from jetrl.precision.flow import load_flow
from jetrl.verification.child import run_child
from jetrl.verification.points import LOG_SOFTMAX, PointRows, PointStore
from jetrl.verification.prompts import make_prompts
from jetrl.verification.workspace import Options, Workspace

# Every so many engine steps one more of the later half of the requests arrives, so that prefill and decode are mixed.
ARRIVAL_STEPS = 4
# Tokens of a mutated sampling: enough for a prefill and a few decodes.
MUTATED_PROMPT, MUTATED_OUTPUT = 40, 4


def main(folder: str, step: str) -> None:
    from jetrl.verification.vllm_arguments import vllm_arguments

    space = Workspace(Path(folder))
    cfg, options = space.config, space.options
    preflight.check_verl_accepts(cfg)  # here, where VeRL is imported anyway, which takes seconds
    arguments, model_config = vllm_arguments(cfg)
    layers_only = step == "layers"
    observe = options.layer_sequences > 0 and (layers_only or bool(arguments.enforce_eager))
    vocabulary = model_config.hf_config.vocab_size
    if model_config.tokenizer is not None:
        vocabulary = min(vocabulary, len(model_config.tokenizer))
    prompts = make_prompts(cfg, options, space, model_config.tokenizer, vocabulary)
    lengths = [options.output_length(i) for i in range(options.sequences)]
    if layers_only:
        prompts = prompts[: options.layer_sequences]
        lengths = [max(1, min(n, options.layer_tokens - len(p))) for n, p in zip(lengths, prompts, strict=False)]
    arguments.skip_tokenizer_init = model_config.tokenizer is None
    engine = _engine(arguments, options, eager=layers_only)
    if arguments.quantization == "fp8":
        _sync_as_verl_does(engine, Path(model_config.local_path))
    if model_config.tokenizer is not None:  # what VeRL's server does after it has started its engine
        engine.collective_rpc("monkey_patch_model", kwargs={"vocab_size": len(model_config.tokenizer)})
    run = _Generation(engine, cfg.actor_rollout_ref.rollout, prompts, lengths)
    if observe:
        observed = _observed(run, engine, options)
        torch.save(observed, space.layers)
        flow = load_flow(cfg.actor_rollout_ref.model.override_config.jetrl_flow)
        if observed and options.mutations and flow.unified:
            torch.save(_mutated(engine, cfg.actor_rollout_ref.rollout, observed["tokens"]), space.mutated)
    else:
        run.finish()
    if layers_only:
        return
    config = engine.vllm_config
    facts = {
        "preemptions": run.preemptions,
        "enforce_eager": bool(config.model_config.enforce_eager),
        "quantization": config.model_config.quantization,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "kv_cache_tokens": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
        "largest_batch": run.largest_batch,
    }
    torch.save({"prompts": prompts, "outputs": run.outputs, "log_probs": run.log_probs, "facts": facts}, space.rollout)


def _engine(arguments: argparse.Namespace, options: Options, eager: bool):
    """vLLM's engine in this process; its worker too where there is one."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    given = {f.name: getattr(arguments, f.name) for f in fields(EngineArgs) if hasattr(arguments, f.name)}
    # The job starts on dummy weights and gets the trainer's, which are the model folder's.
    given["load_format"] = "dummy" if given["quantization"] == "fp8" else "auto"
    given["enable_sleep_mode"] = False
    if given["tensor_parallel_size"] == 1:
        given["distributed_executor_backend"] = "uni"
    if eager:
        given["enforce_eager"] = True
    engine_args = EngineArgs(**given)
    if options.kv_cache_tokens:
        block = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER).cache_config.block_size
        engine_args.num_gpu_blocks_override = max(2, options.kv_cache_tokens // block)
    return LLMEngine.from_engine_args(engine_args, usage_context=UsageContext.OPENAI_API_SERVER)


def _sync_as_verl_does(engine, folder: Path) -> None:
    """vLLM's own FP8 under VeRL is quantized by VeRL while weights arrive (VeRL 0.9.1: update_weights_from_ipc)."""
    from safetensors.torch import load_file
    from verl.utils.vllm.vllm_quant_utils import (
        prepare_quanted_weights_for_loading,
        process_quanted_weights_after_loading,
    )

    worker = getattr(engine.model_executor, "driver_worker", None)
    if worker is None or engine.vllm_config.parallel_config.world_size > 1:
        raise UserError(
            "precision=fp8_vllm is verified with actor_rollout_ref.rollout.tensor_model_parallel_size=1 only"
        )
    worker, files = worker.worker, sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no *.safetensors; precision=fp8_vllm reads its weights from there")
    model = worker.model_runner.model
    state = prepare_quanted_weights_for_loading(model)
    device = next(model.parameters()).device
    for file in files:
        weights = [(name, tensor.to(device)) for name, tensor in load_file(file).items()]
        worker._update_weights(weights, peft_config=None, base_sync_done=True)
    process_quanted_weights_after_loading(model, state)


class _Generation:
    """Sampling as VeRL asks for it, to a given length each, with requests that arrive while others decode."""

    def __init__(self, engine, rollout, prompts: list[list[int]], lengths: list[int]) -> None:
        self.engine, self.prompts = engine, prompts
        self.lengths = lengths
        self.outputs: list[list[int]] = [[] for _ in prompts]
        self.log_probs: list[torch.Tensor] = [torch.empty(0)] * len(prompts)
        self.preemptions = self.largest_batch = 0
        self.sampling = dict(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            repetition_penalty=1.0,
            logprobs=0,
        )

    @staticmethod
    def request_id(sequence: int) -> str:
        return f"sequence{sequence}"

    def finish(self) -> None:
        waiting, step = list(range(len(self.prompts))), 0
        scheduler = self.engine.engine_core.engine_core.scheduler
        preempted: dict[str, int] = {}
        while waiting or self.engine.has_unfinished_requests():
            while waiting and (step == 0 and len(waiting) > len(self.prompts) // 2 or step % ARRIVAL_STEPS == 1):
                self._add(waiting.pop(0))
                if step:
                    break
            for output in self.engine.step():
                if output.finished:
                    self._keep(output)
            preempted.update({r.request_id: r.num_preemptions for r in scheduler.requests.values()})
            self.largest_batch = max(self.largest_batch, len(scheduler.running))
            step += 1
        self.preemptions = sum(preempted.values())

    def _add(self, sequence: int) -> None:
        from vllm import SamplingParams

        # The stop token is ignored: the lengths are those that were asked for.
        sampling = SamplingParams(max_tokens=self.lengths[sequence], ignore_eos=True, detokenize=False, **self.sampling)
        self.engine.add_request(self.request_id(sequence), {"prompt_token_ids": self.prompts[sequence]}, sampling)

    def _keep(self, output) -> None:
        sequence = int(output.request_id.removeprefix("sequence"))
        completion = output.outputs[0]
        tokens = list(completion.token_ids)
        self.outputs[sequence] = tokens
        values = [step[token].logprob for step, token in zip(completion.logprobs, tokens, strict=True)]
        self.log_probs[sequence] = torch.tensor(values, dtype=torch.float32)


def _observed(run: _Generation, engine, options: Options) -> dict:
    """Finishes the generation; returns tokens and operator outputs of the observed sequences, {} where it cannot look."""
    from jetrl.verification.vllm_points import VllmObserver

    worker = getattr(engine.model_executor, "driver_worker", None)
    if worker is None or engine.vllm_config.parallel_config.world_size > 1:
        run.finish()
        return {}
    chosen = range(min(options.layer_sequences, len(run.prompts)))
    names = {run.request_id(i): i for i in chosen}
    with VllmObserver(worker.worker.model_runner, names, options.layer_tokens) as observer:
        run.finish()
    points = observer.store.finish()
    points[LOG_SOFTMAX] = _sampled_log_probs(run, chosen, options.layer_tokens, points)
    tokens = [run.prompts[i] + run.outputs[i] for i in chosen]
    return {"tokens": tokens, "points": points}


def _mutated(engine, rollout, tokens: list[list[int]]) -> list[dict]:
    """A short sampling for every mutation, and first for none, from the starts of the observed sequences.

    Returns [{"mutation": Mutation or None, "refused": why it cannot be applied, or None, "tokens", "points"}].
    """
    from jetrl.verification import mutations, mutations_rollout

    runner = engine.model_executor.driver_worker.worker.model_runner
    names = [name for name, _ in runner.model.named_modules()]
    layers = engine.vllm_config.model_config.hf_config.num_hidden_layers
    chosen = mutations.mutations_of(layers, any(name.endswith("self_attn.q_norm") for name in names))
    prompts = [row[: max(1, min(MUTATED_PROMPT, len(row) - MUTATED_OUTPUT))] for row in tokens]

    def sampled() -> dict:
        _forget_prefixes(engine)
        run = _Generation(engine, rollout, prompts, [MUTATED_OUTPUT] * len(prompts))
        return _observed(run, engine, Options(layer_sequences=len(prompts), layer_tokens=MUTATED_PROMPT * 2))

    records = [{"mutation": None, "refused": None, **sampled()}]
    for mutation in chosen:
        with mutations_rollout.applied(mutation, runner) as refused:
            records.append({"mutation": mutation, "refused": refused, **({} if refused else sampled())})
    return records


def _forget_prefixes(engine) -> None:
    """Keys and values of another mutation. A batch still in flight (asynchronous scheduling) holds blocks for a step."""
    for _ in range(3):
        if engine.reset_prefix_cache():
            return
        engine.step()
    raise JobError("vLLM did not forget its prefix cache between two mutations; run without --mutations")


def _sampled_log_probs(run: _Generation, chosen: range, limit: int, points: dict[str, PointRows]) -> PointRows:
    store = PointStore()
    for i in chosen:
        first = len(run.prompts[i]) - 1
        count = max(0, min(len(run.outputs[i]), limit - first))
        index = torch.tensor([(i, first + n) for n in range(count)], dtype=torch.long).reshape(-1, 2)
        decode = torch.arange(count) > 0  # the first token is sampled at the end of the prefill
        store.add(LOG_SOFTMAX, index, run.log_probs[i][:count, None], decode)
    return store.finish()[LOG_SOFTMAX]


if __name__ == "__main__":
    run_child(lambda: main(*sys.argv[2:4]), sys.argv[1])
