"""Arrays on the device between guards, full of NaN until something is written."""

from typing import Any

MARGIN = 4096
"""Elements of a guard; there is one before, between and after the batch entries of an array."""
PATTERNS = {2: 0x7FA5, 4: 0x7FA5A5A5}
"""By bytes of an element: a NaN of every type of that size which no arithmetic makes."""


class Arrays:
    """Named arrays. Reading a guard gives NaN; writing one is noticed."""

    def __init__(self, device: str):
        self.device = device
        self._kept: dict[str, tuple[Any, int]] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """[batch, …], contiguous within a batch entry, nothing written yet."""
        import torch

        count = 1
        for size in shape[1:]:
            count *= size
        # Every batch entry begins as well aligned as the whole.
        stride = -(-count // 64) * 64 + 2 * MARGIN
        bits = torch.full((shape[0], stride), PATTERNS[dtype.itemsize], dtype=_bits(dtype))
        bits = bits.to(self.device)
        self._kept[name] = (bits, count)
        return bits.view(dtype)[:, MARGIN : MARGIN + count].unflatten(1, shape[1:])

    def holding(self, name: str, values: Any) -> Any:
        """A copy of `values`."""
        array = self.empty(name, tuple(values.shape), values.dtype)
        array.copy_(values)
        return array

    def overrun(self) -> list[str]:
        """Names of the arrays whose guards were written."""
        found = []
        for name, (bits, count) in self._kept.items():
            guards = (bits[:, :MARGIN], bits[:, MARGIN + count :])
            if any(bool((guard != PATTERNS[bits.element_size()]).any()) for guard in guards):
                found.append(name)
        return found


def unwritten(array: Any) -> int:
    """How many elements still are as `Arrays.empty` made them."""
    return int((array.view(_bits(array.dtype)) == PATTERNS[array.element_size()]).sum())


def _bits(dtype: Any) -> Any:
    import torch

    return {2: torch.int16, 4: torch.int32}[dtype.itemsize]
