"""jetrl inside vLLM. vLLM calls `register` in every process through the `vllm.general_plugins` entry point.

Inert until a job asks for `quantization=jetrl`, except for one worker method with which the trainer asks a worker what
it really runs (integrations/vllm/handshake.py), and layer classes that turn into vLLM's own (operators.py). Safe to call
more than once in a process.
"""


def register() -> None:
    from vllm.platforms import current_platform

    from jetrl.integrations.vllm import handshake, operators, quantization  # noqa: F401  (registers the name "jetrl")

    handshake.install()
    operators.register()
    if current_platform.is_cpu():
        from jetrl.integrations.vllm import cpu, exact_cpu

        cpu.keep_weights_after_packing()
        exact_cpu.register()
