"""The key `gemm`: which backend of jetrl_kernels multiplies FP8 matrices."""

from jetrl.errors import UserError


def choose_gemm(name: str) -> None:
    """Choose `name` ("auto" or a backend) for this process, before its first product. Raises UserError as check_gemm does."""
    from jetrl_kernels.backends import select_gemm_backend

    try:
        select_gemm_backend(name)
    except ValueError as e:
        raise UserError(f"gemm={name} cannot be: {e}") from e


def check_gemm(name: str) -> dict[str, str]:
    """What `name` would be on this machine's current device, by field; chooses nothing.

    Raises UserError, with what would work, where it cannot run.
    """
    from jetrl_kernels.backends import describe_backends

    try:
        return describe_backends(name)
    except ValueError as e:
        raise UserError(f"gemm={name} cannot be: {e}") from e
