"""The stand-in for GPUs finds each kind of misuse, through functions of the driver and of NCCL."""

import ctypes
import threading
from ctypes import byref, c_char_p, c_int, c_uint, c_uint64, c_void_p

import platforms
import pytest

pytestmark = [pytest.mark.needs("standin"), pytest.mark.standin]

STORE = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry store(.param .u64 place) {
    .reg .b64 %rd<3>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [place];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, 7;
    st.global.u32 [%rd2], %r1;
    ret;
}
"""
"""A kernel that stores the number 7."""
AHEAD = STORE.replace(b"mov.u32 %r1, 7;", b"ld.global.u32 %r1, [%rd2+4];")
"""A kernel that stores the four bytes behind those that it writes."""


class Driver:
    """The functions of a library, each of which must return 0."""

    def __init__(self):
        self._library = ctypes.CDLL(str(platforms.STANDIN / "lib" / "libstandin.so"))

    def __getattr__(self, name):
        function = getattr(self._library, name)

        def call(*arguments, expected=0):
            code = function(*arguments)
            assert code == expected, f"{name}: {code}"

        return call


driver = Driver() if platforms.current().name == "standin" else None


def of(kind, function, *arguments):
    """Returns what a function writes to the place of its first argument."""
    place = kind()
    getattr(driver, function)(byref(place), *arguments)
    return place


def use(device):
    """Makes a device's context current."""
    driver.cuCtxSetCurrent(of(c_void_p, "cuDevicePrimaryCtxRetain", device))


def allocate(size):
    return of(c_uint64, "cuMemAlloc_v2", ctypes.c_size_t(size))


def stream():
    return of(c_void_p, "cuStreamCreate", 1)


def fill(place, size, on):
    driver.cuMemsetD8Async(place, 1, ctypes.c_size_t(size), on)


def kernel(text=STORE, name=b"store"):
    module = of(c_void_p, "cuModuleLoadData", c_char_p(text))
    return of(c_void_p, "cuModuleGetFunction", module, c_char_p(name))


def launch(function, place, on):
    arguments = (c_void_p * 1)(ctypes.addressof(place))
    one = c_uint(1)
    driver.cuLaunchKernel(function, one, one, one, one, one, one, c_uint(0), on, arguments, None)


@pytest.fixture(autouse=True)
def device():
    """Makes device 0 current, and lets lost devices work again."""
    use(0)
    yield
    for index in range(2):
        use(index)
        driver.standin_mend()
    # XLA expects no context of its threads.
    driver.cuCtxSetCurrent(None)


def complaints(on=None):
    if on is not None:
        ctypes.CDLL(str(platforms.STANDIN / "lib" / "libstandin.so")).cuStreamSynchronize(on)
    return platforms.complaints()


def test_a_kernel_stores_its_number():
    place, on = allocate(4), stream()
    launch(kernel(), place, on)
    assert not complaints(on)
    found = c_uint()
    driver.cuMemcpyDtoH_v2(byref(found), place, ctypes.c_size_t(4))
    assert found.value == 7


def test_writes_that_nothing_orders_are_a_race():
    place, first, second = allocate(64), stream(), stream()
    fill(place, 64, first)
    fill(c_uint64(place.value + 32), 8, second)
    driver.cuStreamSynchronize(first)
    assert "race: memset" in complaints(second)


def test_an_event_orders_writes():
    place, first, second = allocate(64), stream(), stream()
    event = of(c_void_p, "cuEventCreate", 0)
    fill(place, 64, first)
    driver.cuEventRecord(event, first)
    driver.cuStreamWaitEvent(second, event, 0)
    launch(kernel(), place, second)
    assert not complaints(second)


def test_a_host_that_saw_the_end_orders_writes():
    place, first, second = allocate(64), stream(), stream()
    fill(place, 64, first)
    driver.cuStreamSynchronize(first)
    fill(place, 64, second)
    assert not complaints(second)


def test_an_event_of_before_orders_nothing():
    place, first, second = allocate(64), stream(), stream()
    event = of(c_void_p, "cuEventCreate", 0)
    driver.cuEventRecord(event, first)
    launch(kernel(), place, first)
    driver.cuStreamWaitEvent(second, event, 0)
    fill(place, 64, second)
    driver.cuStreamSynchronize(first)
    assert "race: " in complaints(second)


def test_memory_of_another_device_is_told():
    place = allocate(4)
    use(1)
    on = stream()
    launch(kernel(), place, on)
    assert "memory of device 0, in a kernel of device 1" in complaints(on)
    driver.cuStreamQuery(on, expected=700)


def test_memory_that_was_freed_is_told():
    place, on = allocate(4), stream()
    driver.cuMemFree_v2(place)
    fill(place, 4, on)
    assert "that was freed" in complaints(on)


def test_nobody_s_memory_is_told():
    on = stream()
    launch(kernel(), c_uint64(4096), on)
    assert "nobody's memory" in complaints(on)


def test_the_end_of_an_allocation_is_a_bound():
    place, on = allocate(6), stream()
    fill(place, 7, on)
    assert "beyond the end of an allocation of 6 bytes" in complaints(on)


def test_loads_ahead_of_a_bound_give_poison():
    """XLA's kernels load before they check an index; what they store must be in bounds."""
    place, on = allocate(4), stream()
    launch(kernel(AHEAD), place, on)
    assert not complaints(on)
    found = c_uint()
    driver.cuMemcpyDtoH_v2(byref(found), place, ctypes.c_size_t(4))
    assert found.value == 0xFFFFFFFF
    launch(kernel(), c_uint64(place.value + 4), on)
    assert "nobody's memory" in complaints(on)


def test_the_context_of_another_device_is_told():
    on = stream()
    use(1)
    driver.cuStreamSynchronize(on)
    assert "the current context is that of Some(1)" in complaints()


def test_a_function_that_is_not_there_is_named():
    driver.cuTexRefCreate(None, expected=801)
    assert "cuTexRefCreate is not there" in complaints()


def test_an_instruction_that_is_not_there_is_named():
    text = STORE.replace(b"cvta.to.global.u64", b"wgmma.mma_async.x")
    driver.cuModuleLoadData(byref(c_void_p()), c_char_p(text), expected=200)
    assert "wgmma" in complaints()


def test_memory_begins_as_poison():
    found = ctypes.c_float()
    driver.cuMemcpyDtoH_v2(byref(found), allocate(4), ctypes.c_size_t(4))
    assert found.value != found.value


def test_a_handle_that_was_destroyed_is_told():
    on = stream()
    driver.cuStreamDestroy_v2(on)
    driver.cuStreamSynchronize(on, expected=400)
    assert "is no stream, or one that was destroyed" in complaints()


def test_a_stream_that_waits_for_the_null_stream_is_told():
    driver.cuStreamCreate(byref(c_void_p()), 0, expected=801)
    assert "waits for the null stream" in complaints()


def exchange(sent, received):
    """Sends bytes from rank 0 to rank 1."""

    class Id(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_char * 128)]

    name = of(Id, "ncclGetUniqueId")

    def rank(index):
        use(index)
        on, place = stream(), allocate(64)
        comm = of(c_void_p, "ncclCommInitRank", c_int(2), name, c_int(index))
        call, size = (driver.ncclRecv, received) if index else (driver.ncclSend, sent)
        call(place, ctypes.c_size_t(size), c_int(1), c_int(1 - index), comm, on)
        driver.cuStreamSynchronize(on)
        driver.ncclCommDestroy(comm)

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return complaints()


def test_messages_of_equal_length_arrive():
    assert not exchange(8, 8)


def test_a_message_of_another_length_is_told():
    assert "sends 8 bytes, and rank 1 receives 4" in exchange(8, 4)
