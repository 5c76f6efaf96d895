"""Names of a module's tensors, without the modules that only wrap others. Pure."""

from __future__ import annotations

# attributes in which torch.compile and torch's checkpoint_wrapper keep the wrapped module
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")


def plain_name(name: str) -> str:
    """Return a tensor's name without the parts that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in WRAPPED)
