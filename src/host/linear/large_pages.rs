//! Large pages for large results.

use crate::host::array::HostArray;

/// Bytes of a large page.
const PAGE: usize = 1 << 21;

/// Asks the system for large pages where an array's memory covers whole ones; the system may
/// refuse. Without large pages, a new array of 64 MiB costs 16,384 page faults, which took a fifth
/// of the time of both passes.
pub(super) fn ask_for(array: &HostArray) {
    let start = array.ptr.as_ptr() as usize;
    let first = start.next_multiple_of(PAGE);
    let end = (start + array.bytes(&array.rows)) / PAGE * PAGE;
    if first < end {
        advise(first, end - first);
    }
}

#[cfg(target_os = "linux")]
fn advise(start: usize, len: usize) {
    // SAFETY: the advice changes how the system backs the range, and nothing that a program sees.
    unsafe { libc::madvise(start as *mut libc::c_void, len, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise(_start: usize, _len: usize) {}
