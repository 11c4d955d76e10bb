"""What the processes of one verification share: a folder with the composed configuration, the options and the results."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from jetrl.errors import UserError

FOLDER = "verify"


@dataclass(frozen=True)
class Options:
    """What the command line asks beside the job's configuration.

    lengths: output tokens, taken by the sequences in turn; prompt_lengths: the same for prompts of random tokens, empty
    for the task's own prompts. layer_sequences sequences are followed operator by operator, each up to layer_tokens
    tokens (prompt included); 0 switches that off. kv_cache_tokens: size of vLLM's KV cache, 0 for vLLM's own choice.
    max_kl: the largest k3 KL that passes. mutations: perturb operators in either engine and see that each is found.
    """

    sequences: int = 8
    lengths: tuple[int, ...] = (64,)
    prompt_lengths: tuple[int, ...] = ()
    layer_sequences: int = 2
    layer_tokens: int = 96
    kv_cache_tokens: int = 0
    max_kl: float | None = None
    seed: int = 0
    mutations: bool = False

    def output_length(self, sequence: int) -> int:
        return self.lengths[sequence % len(self.lengths)]


@dataclass(frozen=True)
class Workspace:
    """folder: <run.dir>/verify. Every file below it is rewritten by the next verification of that run."""

    folder: Path

    @property
    def config(self) -> DictConfig:
        return OmegaConf.load(self.folder / "config.yaml")

    @property
    def options(self) -> Options:
        data = json.loads((self.folder / "options.json").read_text())
        return Options(**{k: tuple(v) if isinstance(v, list) else v for k, v in data.items()})

    @property
    def rollout(self) -> Path:
        """Prompts, sampled tokens and log-probs, and facts about the engine."""
        return self.folder / "rollout.pt"

    @property
    def layers(self) -> Path:
        """Operator outputs of the observed sequences in the rollout."""
        return self.folder / "layers.pt"

    @property
    def mutated(self) -> Path:
        """For every mutation of the rollout, and first for none: tokens and operator outputs of a short sampling."""
        return self.folder / "mutated.pt"

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    def log(self, step: str) -> Path:
        return self.folder / f"{step}.log"

    def write(self, cfg: DictConfig, options: Options) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for stale in (self.rollout, self.layers, self.mutated, self.result):
                stale.unlink(missing_ok=True)
            (self.folder / "config.yaml").write_text(OmegaConf.to_yaml(cfg, resolve=True))
            (self.folder / "options.json").write_text(json.dumps(asdict(options)))
        except OSError as e:
            raise UserError(f"{self.folder} cannot be written ({e.strerror}); choose another run.dir") from e
