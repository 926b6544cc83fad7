"""Arrays on the device between guards, full of NaN before the first write."""

from typing import Any

MARGIN = 4096
"""Elements of a guard. Guards stand before, between and after an array's batch entries."""
PATTERNS = {2: 0x7FA5, 4: 0x7FA5A5A5}
"""By bytes of an element: bits that are NaN in every type of this size and never a result."""


class Arrays:
    """Named arrays. A read of a guard gives NaN; `overrun` finds writes to guards."""

    def __init__(self, device: str):
        self.device = device
        self._kept: dict[str, tuple[Any, int]] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns an unwritten array [batch, …], contiguous within a batch entry."""
        import torch

        count = 1
        for size in shape[1:]:
            count *= size
        # Every batch entry has the alignment of the whole array.
        stride = -(-count // 64) * 64 + 2 * MARGIN
        bits = torch.full((shape[0], stride), PATTERNS[dtype.itemsize], dtype=_bits(dtype))
        bits = bits.to(self.device)
        self._kept[name] = (bits, count)
        return bits.view(dtype)[:, MARGIN : MARGIN + count].unflatten(1, shape[1:])

    def holding(self, name: str, values: Any) -> Any:
        """Returns a copy of `values`."""
        array = self.empty(name, tuple(values.shape), values.dtype)
        array.copy_(values)
        return array

    def overrun(self) -> list[str]:
        """Returns the names of arrays whose guards were written."""
        found = []
        for name, (bits, count) in self._kept.items():
            guards = (bits[:, :MARGIN], bits[:, MARGIN + count :])
            if any(bool((guard != PATTERNS[bits.element_size()]).any()) for guard in guards):
                found.append(name)
        return found


def unwritten(array: Any) -> int:
    """Returns how many elements are unchanged since `Arrays.empty`."""
    return int((array.view(_bits(array.dtype)) == PATTERNS[array.element_size()]).sum())


def _bits(dtype: Any) -> Any:
    import torch

    return {2: torch.int16, 4: torch.int32}[dtype.itemsize]
