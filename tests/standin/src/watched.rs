//! The memory that a kernel of XLA sees: each access is checked and noted.

use std::collections::BTreeMap;
use std::ops::Range;

use burst_attention_ptx as ptx;

use crate::memory::{self, By, POISON, Touch};

/// Runs that grow with the next accesses. A kernel goes through several arrays at a time.
const GROWING: usize = 8;

/// The runs of bytes that a kernel touched, joined where they meet.
#[derive(Debug, Default)]
struct Runs {
    growing: [Range<u64>; GROWING],
    /// The growing run that the next new one replaces.
    oldest: usize,
    /// Starts and ends of all other runs.
    ended: BTreeMap<u64, u64>,
}

impl Runs {
    fn add(&mut self, bytes: Range<u64>) {
        for run in &mut self.growing {
            if bytes.start <= run.end && run.start <= bytes.end {
                *run = run.start.min(bytes.start)..run.end.max(bytes.end);
                return;
            }
        }
        let run = std::mem::replace(&mut self.growing[self.oldest], bytes);
        self.oldest = (self.oldest + 1) % GROWING;
        self.end(run);
    }

    fn end(&mut self, mut run: Range<u64>) {
        while let Some((&start, &end)) = self.ended.range(..=run.end).next_back() {
            if end < run.start {
                break;
            }
            self.ended.remove(&start);
            run = run.start.min(start)..run.end.max(end);
        }
        self.ended.insert(run.start, run.end);
    }

    fn all(mut self) -> impl Iterator<Item = Range<u64>> {
        std::mem::take(&mut self.growing).into_iter().for_each(|run| self.end(run));
        self.ended.into_iter().map(|(start, end)| start..end).filter(|run| !run.is_empty())
    }
}

/// The memory of a device during a launch.
#[derive(Debug)]
pub struct Watched {
    by: By,
    touched: Runs,
    written: Runs,
    /// Allocations that the kernel may touch, as long as no memory is freed.
    known: Vec<Range<u64>>,
    frees: u64,
}

impl Watched {
    pub fn new(device: usize) -> Watched {
        let (touched, written) = (Runs::default(), Runs::default());
        Watched { by: By::Kernel(device), touched, written, known: vec![], frees: 0 }
    }

    /// Returns what the kernel touched.
    pub fn touches(self) -> Vec<Touch> {
        let by = self.by;
        let touch = |writes| move |bytes| Touch { bytes, writes, by };
        let written = self.written.all().map(touch(true));
        self.touched.all().map(touch(false)).chain(written).collect()
    }

    /// Checks an access. Most find their allocation among those of earlier accesses.
    fn check(&mut self, bytes: Range<u64>, writes: bool) -> Result<(), String> {
        let frees = memory::frees();
        if frees != self.frees {
            self.known.clear();
            self.frees = frees;
        }
        let holds = |known: &Range<u64>| known.start <= bytes.start && bytes.end <= known.end;
        if !self.known.iter().any(holds) {
            self.known.push(memory::check(&Touch { bytes, writes, by: self.by })?);
        }
        Ok(())
    }
}

impl ptx::Memory for Watched {
    fn load(&mut self, address: u64, bytes: &mut [u8]) -> Result<(), String> {
        let range = address..address + bytes.len() as u64;
        if let Err(why) = self.check(range.clone(), false) {
            if !memory::is_slack(address) {
                return Err(why);
            }
            bytes.fill(POISON);
            return Ok(());
        }
        self.touched.add(range);
        // SAFETY: `check` has found the bytes in an allocation that lives.
        unsafe {
            std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), bytes.len());
        }
        Ok(())
    }

    fn store(&mut self, address: u64, bytes: &[u8]) -> Result<(), String> {
        let range = address..address + bytes.len() as u64;
        self.check(range.clone(), true)?;
        self.written.add(range);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), address as *mut u8, bytes.len()) };
        Ok(())
    }
}
