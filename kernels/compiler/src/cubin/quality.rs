//! Counts of the instructions in a kernel's loops: matrix products, loads, exponentials, masking,
//! spills.

use super::flow::{Loop, loops};
use super::order::{is_exponential, is_matrix};
use super::{Cubin, Error, EventOrder, Instruction, Listing};

/// Threads of a warp.
const LANES: u32 = 32;

/// Numbers of instructions of each kind in a piece of code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Matrix products: `HMMA`, `HGMMA`, `UTC*MMA`.
    pub matrix: u32,
    /// Loads of tiles by the tensor memory accelerator: `UTMALDG`, `UBLKCP`.
    pub tma_loads: u32,
    /// Asynchronous copies of single threads into shared memory: `LDGSTS`.
    pub async_copies: u32,
    /// Loads of single threads from global memory into registers: `LDG`.
    pub global_loads: u32,
    /// Exponentials: `MUFU.EX2`.
    pub exponentials: u32,
    /// Products and sums of float32; packed instructions (`FFMA2`) count once.
    pub arithmetic: u32,
    /// Comparisons of integers and selections, which make up masking.
    pub masking: u32,
    /// Barriers of a block: `BAR`.
    pub barriers: u32,
    /// Waits for matrix products: `WARPGROUP.DEPBAR`.
    pub waits: u32,
    /// Loads from a thread's stack: `LDL`.
    pub spill_loads: u32,
    /// Stores to a thread's stack: `STL`.
    pub spill_stores: u32,
}

impl Counts {
    fn of<'a>(instructions: impl Iterator<Item = &'a Instruction>) -> Self {
        let mut counts = Self::default();
        instructions.for_each(|instruction| counts.add(instruction));
        counts
    }

    fn add(&mut self, instruction: &Instruction) {
        let counter = match instruction.base() {
            _ if is_matrix(instruction) => &mut self.matrix,
            _ if is_exponential(instruction) => &mut self.exponentials,
            "UTMALDG" | "UBLKCP" => &mut self.tma_loads,
            "LDGSTS" => &mut self.async_copies,
            "LDG" => &mut self.global_loads,
            "FFMA" | "FMUL" | "FADD" | "FFMA2" | "FMUL2" | "FADD2" => &mut self.arithmetic,
            "ISETP" | "FSEL" | "SEL" => &mut self.masking,
            "BAR" => &mut self.barriers,
            "WARPGROUP" if instruction.opcode.contains("DEPBAR") => &mut self.waits,
            "LDL" => &mut self.spill_loads,
            "STL" => &mut self.spill_stores,
            _ => return,
        };
        *counter += 1;
    }
}

/// A loop without its inner loops.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoopQuality {
    /// Address of its first instruction.
    pub address: u64,
    /// Its instructions.
    pub counts: Counts,
    /// The order of its products and exponentials.
    pub order: EventOrder,
}

/// The quality of a compiled kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quality {
    /// Name of the image: kernel and tile shape.
    pub name: String,
    /// Architecture, such as `sm_90a`.
    pub target: String,
    /// Registers of a thread at launch.
    pub registers: u32,
    /// Registers of all warps of a block at launch, for a lane.
    pub pool: u32,
    /// Registers that a warp which computes waits for, if warps trade registers.
    pub awaited: Option<u32>,
    /// Bytes of static shared memory.
    pub shared: u64,
    /// Bytes of a thread's stack.
    pub stack: u32,
    /// All instructions of the image.
    pub total: Counts,
    /// Loops with any counted instruction, by address. Waits for a barrier, which are loops of
    /// three instructions, have none.
    pub loops: Vec<LoopQuality>,
}

impl Quality {
    /// Returns the quality of an image, given with its disassembly.
    ///
    /// # Errors
    ///
    /// If image and disassembly are of different kernels, or the listing's control flow is not
    /// understood.
    pub fn new(name: &str, cubin: &Cubin, listing: &Listing) -> Result<Self, Error> {
        let kernel = &cubin.kernel;
        if !listing.functions.iter().any(|(function, _)| *function == kernel.name) {
            let functions = listing.functions.iter().map(|(name, _)| name.clone()).collect();
            return Err(Error::OtherKernel { cubin: kernel.name.clone(), listing: functions });
        }
        let all = loops(listing)?;
        let quality = |index| loop_quality(listing, &all, index);
        let counted = |found: &LoopQuality| found.counts != Counts::default();
        Ok(Self {
            name: name.into(),
            target: cubin.architecture.to_string(),
            registers: kernel.registers,
            pool: kernel.registers.saturating_mul(kernel.threads / LANES),
            awaited: listing.instructions.iter().filter_map(awaited).max(),
            shared: kernel.shared,
            stack: kernel.frame,
            total: Counts::of(listing.instructions.iter()),
            loops: (0..all.len()).map(quality).filter(counted).collect(),
        })
    }

    /// Returns the loops with matrix products.
    pub fn main_loops(&self) -> impl Iterator<Item = &LoopQuality> {
        self.loops.iter().filter(|found| found.counts.matrix > 0)
    }

    /// Returns the loops with both products of attention and with exponentials.
    pub fn attention_loops(&self) -> impl Iterator<Item = &LoopQuality> {
        self.loops.iter().filter(|found| found.order.is_attention())
    }

    /// Returns the sum of a count over all loops.
    pub fn in_loops(&self, count: impl Fn(&Counts) -> u32) -> u32 {
        self.loops.iter().map(|found| count(&found.counts)).sum()
    }
}

/// Returns the registers that an instruction waits for: `USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8`.
fn awaited(instruction: &Instruction) -> Option<u32> {
    let trades = instruction.opcode.starts_with("USETMAXREG.TRY_ALLOC");
    let count = instruction.operand_list().last().filter(|_| trades)?;
    u32::from_str_radix(count.trim_start_matches("0x"), 16).ok()
}

fn loop_quality(listing: &Listing, loops: &[Loop], index: usize) -> LoopQuality {
    let own = loops[index].own(index, loops);
    let instructions: Vec<_> = own.iter().map(|&at| &listing.instructions[at]).collect();
    LoopQuality {
        address: listing.instructions[loops[index].header].address,
        counts: Counts::of(instructions.iter().copied()),
        order: EventOrder::of(&instructions),
    }
}

#[cfg(test)]
mod tests {
    use super::super::synthetic::sample;
    use super::*;

    /// A producer's loop, and a consumer's loop with a spill and an inner loop of masking.
    const KERNEL: &str = "        .type           forward_entry,@function
forward_entry:
        /*0000*/                   STL [R1], R2 ;
        /*0008*/                   USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xe8 ;
        /*0010*/               @P0 BRA `(.L_consumer) ;
.L_producer:
        /*0020*/                   UTMALDG.3D [UR24], [UR14], desc[URZ] ;
        /*0030*/                   UTMALDG.3D [UR8], [UR14], desc[URZ] ;
        /*0040*/               @P0 BRA `(.L_producer) ;
        /*0050*/                   EXIT ;
.L_consumer:
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT, gsb0 ;
        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0080*/                   LDL.LU R2, [R1] ;
.L_mask:
        /*0090*/                   ISETP.GE.AND P1, PT, R2, R3, PT ;
        /*00a0*/                   FSEL R24, R24, -INF, P1 ;
        /*00b0*/               @P2 BRA `(.L_mask) ;
        /*00c0*/                   FFMA R24, R24, R5, R6 ;
        /*00d0*/                   MUFU.EX2 R72, R24 ;
        /*00e0*/                   HGMMA.64x128x16.F32.BF16 R88, R72, gdesc[UR4].tnspB, R88 ;
        /*00f0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
.L_wait:
        /*0100*/                   SYNCS.PHASECHK.TRANS64 P3, [R4], R5 ;
        /*0110*/              @!P3 BRA `(.L_wait) ;
        /*0120*/               @P0 BRA `(.L_consumer) ;
        /*0130*/                   LDL R2, [R1] ;
        /*0140*/                   EXIT ;
";

    fn quality(text: &str) -> Result<Quality, Error> {
        let cubin = Cubin::parse(&sample().bytes()).unwrap();
        Quality::new("forward_64", &cubin, &Listing::parse(text).unwrap())
    }

    #[test]
    fn counts_what_is_in_every_loop_without_the_loops_in_it() {
        let loops = quality(KERNEL).unwrap().loops;
        let places: Vec<_> = loops.iter().map(|found| found.address).collect();
        assert_eq!(places, [0x20, 0x60, 0x90]);
        let [producer, consumer, mask] = [0, 1, 2].map(|i| loops[i].counts);
        assert_eq!(producer, Counts { tma_loads: 2, ..Counts::default() });
        let expected = Counts {
            matrix: 2,
            exponentials: 1,
            arithmetic: 1,
            barriers: 1,
            waits: 1,
            spill_loads: 1,
            ..Counts::default()
        };
        assert_eq!(consumer, expected);
        assert_eq!(mask, Counts { masking: 2, ..Counts::default() });
        assert_eq!(loops[1].order.to_string(), "Q W E P");
    }

    #[test]
    fn spills_outside_of_loops_are_in_the_total_only() {
        let quality = quality(KERNEL).unwrap();
        assert_eq!((quality.total.spill_loads, quality.total.spill_stores), (2, 1));
        assert_eq!(quality.in_loops(|counts| counts.spill_loads), 1);
        assert_eq!(quality.in_loops(|counts| counts.spill_stores), 0);
        assert_eq!((quality.registers, quality.shared, quality.stack), (168, 231_104, 16));
        assert_eq!((quality.main_loops().count(), quality.attention_loops().count()), (1, 1));
        assert_eq!((quality.pool, quality.awaited), (12 * 168, Some(232)));
    }

    #[test]
    fn a_listing_of_another_kernel_is_refused() {
        let error = quality(&KERNEL.replace("forward_entry", "backward_entry")).unwrap_err();
        let listing = vec!["backward_entry".to_owned()];
        assert_eq!(error, Error::OtherKernel { cubin: "forward_entry".into(), listing });
    }
}
