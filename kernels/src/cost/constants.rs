//! The numbers of costs, in microseconds, and where each comes from.
//!
//! **sm_90** was measured on one H100 at its power limit: `benchmarks/results/nvidia-h100-80gb-hbm3`
//! has single launches of 32,768 tokens in rows of 2,048 to 16,384, `…-ring` the rings. Each block's
//! base was found at 128 columns and holds at 64 and 256, where rows of two lengths can't tell it
//! from the time of a tile. The worst error of each fit:
//!
//! | kernel | 64 columns | 128 | 256 |
//! |---|---|---|---|
//! | forward | 1.6% | 2.3% | 1.6% |
//! | dk and dv | 2% | 4% | 2% |
//! | dq | 3% | 8% | 9% |
//! | fused | 2% | 5% | – |
//! | cuDNN 9.19, forward | 0.5% | 3% | 5% |
//! | cuDNN 9.19, backward | 4% | 5% | 6% |
//!
//! The kernels of the backward pass follow their timings alone, which the rings confirm. At 128
//! columns the pass of both took 2 to 7% less than these where it took turns with cuDNN. The fused
//! kernel's measured passes are scaled alike, so that both orders of sums compare as measured.
//!
//! **sm_100 and sm_103**: cuDNN's published rates at 128 columns (NVIDIA/cudnn-frontend,
//! `benchmark/sdpa_benchmark_training/results/llama3.1`: 9.27 on a GB200, August 2026, and 9.25 on a
//! GB300, July 2026; 64 query and 8 key/value heads), from 4,096 to 32,768 tokens within 5% on a GB300
//! and 10% on a GB200, whose rates fall from 16,384 tokens on. Other columns are assumed to take time
//! in proportion. No Blackwell GPU has timed this library's kernels: they are assumed to be as fast
//! as a kernel of the same Tile IR on a B200, 1,007 TFLOP/s forward (arXiv:2604.23466), and backward
//! by as much slower as cuDNN was on a GB200.

use super::Source;
use super::blocks::Streams;
use crate::kernel::Kernel;
use crate::launch::Rectangle;
use crate::target::Target;
use crate::tiles::TileShape;
use crate::variant::Variant;

/// What a block of a kernel takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Block {
    /// A tile whose pairs all see each other.
    pub tile: f64,
    /// Factor on tiles of which some pairs do.
    pub mask: f64,
    /// What a block takes besides its tiles.
    pub base: f64,
    /// Factor on tiles where each query head has keys of its own.
    pub ungrouped: f64,
}

/// Returns a block of a kernel without factors.
const fn block(tile: f64, base: f64) -> Block {
    Block { tile, mask: 1.0, base, ungrouped: 1.0 }
}

/// A device as costs see it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Device {
    pub target: Target,
    /// Bytes per second of passes over rows.
    pub memory: f64,
    /// Where that comes from.
    pub memory_source: Source,
    /// Microseconds between the end of a launch and the first block of the next.
    pub gap: f64,
}

/// Microseconds between launches, an assumption; what a block takes to begin is in its base.
const GAP: f64 = 2.2;

/// Returns the seconds between launches that costs on `target` count, if any are known there.
pub fn launch_gap(target: Target) -> Option<f64> {
    Device::of(target).map(|device| device.gap * 1e-6)
}

/// Microseconds in which a block of an H100 reads or writes 64 KiB of a float32 state, while all
/// others do. Fitted to one ring of eight ranks with 4,096 tokens, forward: it holds what the ring
/// takes beyond its blocks, rounds and gaps. 2.0 to 2.9 by how much of its copies were hidden.
const CARRY: f64 = 2.9;

/// Factor of cuDNN's gradients in a fixed order, where no rate is published: what the order costs
/// on a GB200.
const FIXED_ORDER: f64 = 1.15;

impl Device {
    /// Returns the device; `None` where no cost is known.
    pub fn of(target: Target) -> Option<Device> {
        let (memory, memory_source) = match target {
            // A copy on the H100.
            Target::Sm90 => (2.878e12, Source::Measured),
            // Of 8 TB/s as specified, an assumption.
            Target::Sm100 | Target::Sm103 => (5e12, Source::Predicted),
            Target::Sm80 | Target::Sm120 => return None,
        };
        Some(Device { target, memory, memory_source, gap: GAP })
    }

    /// Microseconds in which a block of a kernel reads or writes its state once.
    pub fn carry(self, kernel: Kernel, tile: TileShape, width: i32) -> f64 {
        let columns = match kernel {
            Kernel::KeyGrads => tile.keys * width * 2,
            _ => tile.rows * width,
        };
        let bytes = f64::from(columns) * 4.0;
        match self.target {
            Target::Sm90 => bytes / 65_536.0 * CARRY,
            // All blocks at once, over the device's memory.
            _ => bytes * self.target.multiprocessors() as f64 / self.memory * 1e6,
        }
    }

    /// Returns a block of this library's kernel for tiles of `width` columns, of the shape that
    /// [`crate::tiles`] gives its plain image.
    pub fn own(self, kernel: Kernel, fused: bool, width: i32) -> Option<(Block, Source)> {
        match self.target {
            Target::Sm90 => on_h100(kernel, fused, width).map(|block| (block, Source::Measured)),
            Target::Sm100 | Target::Sm103 => {
                // Of 128 columns; other tiles take time in proportion to their products.
                let known = in_tile_ir(kernel, fused)?;
                let products = |width| {
                    let tile = (kernel.spec().tile)(Variant::PLAIN, self.target, width);
                    f64::from(tile.rows * tile.keys * width)
                };
                let tile = known.tile * products(width) / products(128);
                Some((Block { tile, ..known }, Source::Predicted))
            }
            Target::Sm80 | Target::Sm120 => None,
        }
    }

    /// Returns a block of cuDNN's forward pass, and how it divides a rectangle.
    pub fn cudnn_forward(self, rectangle: &Rectangle) -> Option<(Block, Streams, Source)> {
        let columns = (rectangle.head_dim, rectangle.value_dim);
        let on_h100 = |block, source| Some((block, Streams::queries(128, 64), source));
        let on_blackwell = |tile: f64| {
            let (part, source) = of_128_columns(columns)?;
            Some((block(tile * part, 3.0), Streams::queries(256, 128), source))
        };
        match (self.target, columns) {
            (Target::Sm90, (64, 64)) => on_h100(block(0.568, 4.0), Source::Measured),
            (Target::Sm90, (128, 128)) => on_h100(block(0.817, 2.6), Source::Measured),
            (Target::Sm90, (256, 256)) => on_h100(block(1.574, 4.0), Source::Measured),
            // Between 128 and 256 columns.
            (Target::Sm90, (192, 128)) => on_h100(block(1.006, 3.0), Source::Predicted),
            (Target::Sm100, _) => on_blackwell(1.488),
            (Target::Sm103, _) => on_blackwell(1.101),
            _ => None,
        }
    }

    /// Returns a block of cuDNN's backward pass, which keeps keys of one query head.
    pub fn cudnn_backward(
        self,
        rectangle: &Rectangle,
        fixed_order: bool,
    ) -> Option<(Block, Streams, Source)> {
        let columns = (rectangle.head_dim, rectangle.value_dim);
        let on_blackwell = |row: f64, fixed: f64| {
            let (part, source) = of_128_columns(columns).filter(|_| columns != (256, 256))?;
            Some((row * part * if fixed_order { fixed } else { 1.0 }, 2.0, source))
        };
        let on_h100 = |row: f64, source: Source| match fixed_order {
            true => Some((row * FIXED_ORDER, 7.0, source.max(Source::Predicted))),
            false => Some((row, 7.0, source)),
        };
        // Microseconds of a query row, and a block's base.
        let (row, base, source) = match (self.target, columns) {
            (Target::Sm90, (64, 64)) => on_h100(0.0227, Source::Measured),
            (Target::Sm90, (128, 128)) => on_h100(0.0372, Source::Measured),
            (Target::Sm90, (256, 256)) => on_h100(0.107, Source::Measured),
            // Between 128 and 256 columns.
            (Target::Sm90, (192, 128)) => on_h100(0.0547, Source::Predicted),
            (Target::Sm100, _) => on_blackwell(0.0170, 1.153),
            (Target::Sm103, _) => on_blackwell(0.0146, 1.130),
            _ => None,
        }?;
        Some((block(64.0 * row, base), Streams::keys(128, 64), source))
    }
}

/// Returns a block of this library's kernels on an H100.
fn on_h100(kernel: Kernel, fused: bool, width: i32) -> Option<Block> {
    let forward = |tile| Block { mask: 1.15, ..block(tile, 3.4) };
    Some(match (kernel, fused, width) {
        (Kernel::Forward, _, 64) => forward(1.162),
        (Kernel::Forward, _, 128) => forward(0.955),
        (Kernel::Forward, _, 256) => forward(1.653),
        (Kernel::KeyGrads, false, 64) => block(1.235, 4.3),
        (Kernel::KeyGrads, false, 128) => block(2.15, 4.3),
        (Kernel::KeyGrads, false, 256) => block(1.529, 4.3),
        (Kernel::KeyGrads, true, 64) => block(3.36, 4.3),
        (Kernel::KeyGrads, true, 128) => block(3.52, 4.3),
        (Kernel::QueryGrads, _, 64) => block(0.711, 5.0),
        (Kernel::QueryGrads, _, 128) => Block { ungrouped: 1.056, ..block(1.25, 5.0) },
        (Kernel::QueryGrads, _, 256) => block(1.521, 5.0),
        _ => return None,
    })
}

/// Returns a block of 128 columns on Blackwell, of the tile shapes of sm_100. Nothing is known of a
/// fused kernel there.
fn in_tile_ir(kernel: Kernel, fused: bool) -> Option<Block> {
    match kernel {
        Kernel::Forward => Some(block(1.13, 3.4)),
        Kernel::KeyGrads if !fused => Some(block(0.97, 4.3)),
        Kernel::QueryGrads => Some(block(0.70, 5.0)),
        _ => None,
    }
}

/// Returns the work of columns of keys and values as a part of that of 128 and 128, for which rates
/// are published.
fn of_128_columns(columns: (usize, usize)) -> Option<(f64, Source)> {
    match columns {
        (128, 128) => Some((1.0, Source::Published)),
        (64, 64) | (192, 128) | (256, 256) => {
            Some(((columns.0 + columns.1) as f64 / 256.0, Source::Predicted))
        }
        _ => None,
    }
}
