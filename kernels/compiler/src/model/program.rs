//! A loop as the simulation needs it: units, waits, and the memory that is filled and released.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use super::ACTIVATION;
use crate::cubin::{Control, Instruction, Listing};

/// Latencies in cycles of instructions that take a varying time.
const GLOBAL_LOAD: f64 = 450.0;
const CONSTANT: f64 = 35.0;
const CONVERSION: f64 = 30.0;
const OTHER: f64 = 25.0;

/// The unit that carries out an instruction, with the numbers that its cost depends on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Unit {
    /// A matrix product: cycles of the tensor core and of shared memory, and whether it ends a
    /// group that a wait can name.
    Matrix {
        tensor: f64,
        shared: f64,
        commits: bool,
    },
    /// A wait for groups of products, with the number of groups that may stay unfinished.
    Groups(usize),
    /// A wait for memory to be filled.
    Phase,
    /// A barrier of the block's computing warps.
    Barrier,
    /// float32 products and sums: two pipes.
    Float,
    /// Integer products: one of the two float32 pipes.
    Product,
    Integer,
    Uniform,
    /// Exponentials and reciprocals.
    Special,
    Shuffle,
    /// Accesses to shared memory, with the cycles of shared memory that they take.
    Shared(f64),
    /// Asynchronous copies of single threads.
    Copy,
    /// An instruction that costs its latency and little else.
    Latency(f64),
    Fence,
    /// An instruction that costs an issue slot only.
    Free,
}

impl Unit {
    fn of(instruction: &Instruction) -> Self {
        let opcode = instruction.opcode.as_str();
        match instruction.base() {
            "HGMMA" => matrix(instruction),
            "MUFU" => Self::Special,
            "FFMA" | "FADD" | "FMUL" | "FFMA32I" | "FMUL32I" | "FADD32I" | "HFMA2" | "HADD2"
            | "HMUL2" => Self::Float,
            "IMAD" => Self::Product,
            "LDS" | "STS" | "LDSM" | "STSM" | "ATOMS" => Self::Shared(shared_cycles(instruction)),
            "SHFL" => Self::Shuffle,
            "LDGSTS" => Self::Copy,
            "LDG" => Self::Latency(GLOBAL_LOAD),
            "LDC" => Self::Latency(CONSTANT),
            "I2F" | "F2I" | "STG" => Self::Latency(CONVERSION),
            "S2R" | "LDL" | "STL" | "S2UR" | "I2I" | "POPC" | "RED" | "ATOMG" | "ATOM"
            | "REDUX" => Self::Latency(OTHER),
            "SYNCS" if opcode.contains("PHASECHK") => Self::Phase,
            "BAR" if opcode.starts_with("BAR.SYNC") => Self::Barrier,
            "WARPGROUP" if opcode.contains("DEPBAR") => Self::Groups(last_number(instruction)),
            "MEMBAR" | "FENCE" => Self::Fence,
            "SYNCS" | "BAR" | "WARPGROUP" | "BRA" | "NOP" | "EXIT" | "BSSY" | "BSYNC"
            | "WARPSYNC" | "LDGDEPBAR" | "ARRIVES" | "DEPBAR" | "CALL" | "ELECT" | "NANOSLEEP" => {
                Self::Free
            }
            base if base.starts_with('U') => Self::Uniform,
            _ => Self::Integer,
        }
    }
}

/// Returns the unit of `HGMMA.64xNxK`: N/2 cycles for each 16 of K. Shared memory gives B, and A
/// where it is in shared memory, at 128 bytes a cycle.
fn matrix(instruction: &Instruction) -> Unit {
    let shape = instruction.opcode.split('.').nth(1).unwrap_or_default();
    let sizes: Vec<f64> = shape.split('x').filter_map(|size| size.parse().ok()).collect();
    let [m, n, k] = sizes[..] else { return Unit::Free };
    let from_registers = instruction.operand_list().nth(1).is_some_and(|a| a.starts_with('R'));
    let left = if from_registers { 0.0 } else { m * k };
    Unit::Matrix {
        tensor: n / 2.0 * (k / 16.0),
        shared: (n * k + left) * ACTIVATION / 128.0,
        commits: instruction.operands.contains("gsb0"),
    }
}

/// Returns the cycles of shared memory that 32 threads of each sub-partition take. The four
/// sub-partitions share its 128 bytes a cycle.
fn shared_cycles(instruction: &Instruction) -> f64 {
    let has = |part: &str| instruction.opcode.split('.').any(|p| p == part);
    if instruction.base() == "LDS" && instruction.operands.starts_with("RZ") {
        return 0.0;
    }
    match instruction.base() {
        "LDSM" | "STSM" if has("4") => 16.0,
        "LDSM" | "STSM" if has("2") => 8.0,
        _ if has("128") => 16.0,
        _ if has("64") => 8.0,
        _ => 4.0,
    }
}

fn last_number(instruction: &Instruction) -> usize {
    let digits = instruction.operands.rsplit("0x").next().unwrap_or_default();
    usize::from_str_radix(digits.trim(), 16).unwrap_or(0)
}

/// Memory that is filled while the loop computes, and that the loop releases.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Filling {
    /// Memory of `stages` stages of `bytes` bytes that the tensor memory accelerator fills.
    Tiles { stages: usize, bytes: f64 },
    /// Memory that asynchronous copies of the loop's own threads fill, `ahead` iterations ahead.
    Copies { ahead: usize },
}

/// An instruction of an iteration.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub unit: Unit,
    pub control: Control,
    /// The filling that it waits for.
    pub needs: Option<usize>,
    /// The fillings that it starts, or whose memory it releases.
    pub releases: Vec<usize>,
}

/// One iteration of a loop, as it runs where every wait is over at once.
#[derive(Debug, Clone)]
pub(super) struct Program {
    pub steps: Vec<Step>,
    pub fillings: Vec<Filling>,
}

impl Program {
    /// Returns the loop at `range`, whose tiles have `bytes` each; `None` where the listing has no
    /// encodings.
    pub fn new(listing: &Listing, range: &RangeInclusive<usize>, bytes: f64) -> Option<Self> {
        let path = path(listing, range);
        let at = |k: usize| &listing.instructions[k];
        let steps = path.iter().map(|&k| {
            let control = at(k).control?;
            Some(Step { unit: Unit::of(at(k)), control, needs: None, releases: Vec::new() })
        });
        let mut program = Self { steps: steps.collect::<Option<_>>()?, fillings: Vec::new() };
        let instructions: Vec<&Instruction> = path.iter().map(|&k| at(k)).collect();
        program.find_fillings(&instructions, bytes);
        Some(program)
    }

    /// Finds the fillings by their barriers. A full barrier lies at most 64 bytes before its empty
    /// barrier, and between them lies a barrier of 8 bytes for each further stage. Where an empty
    /// barrier belongs to several full barriers, the last release counts.
    fn find_fillings(&mut self, path: &[&Instruction], bytes: f64) {
        let places = |is: fn(&Instruction) -> bool| {
            (0..path.len()).filter(move |&k| is(path[k])).collect::<Vec<_>>()
        };
        let waits = places(|i| i.opcode.contains("PHASECHK"));
        let arrives = places(|i| i.opcode.starts_with("SYNCS.ARRIVE"));
        let copied = places(|i| i.base() == "ARRIVES");
        let mut empty: HashMap<u64, usize> = HashMap::new();
        empty.extend(arrives.iter().map(|&k| (offset(path[k]), k)));
        let full: Vec<u64> = waits.iter().map(|&k| offset(path[k])).collect();
        let mut unknown = Vec::new();
        for (&wait, &place) in waits.iter().zip(&full) {
            let index = self.fillings.len();
            self.steps[wait].needs = Some(index);
            let starts: Vec<usize> =
                copied.iter().copied().filter(|&k| offset(path[k]) == place).collect();
            if let Some(&first) = starts.first() {
                starts.iter().for_each(|&k| self.steps[k].releases.push(index));
                self.fillings.push(Filling::Copies { ahead: usize::from(first > wait) });
                continue;
            }
            let belongs = |&&end: &&u64| {
                end > place && end - place <= 64 && !full.iter().any(|&f| place < f && f < end)
            };
            let stages = match (empty.keys().filter(belongs).min(), arrives.last()) {
                (Some(&end), _) => {
                    self.steps[empty[&end]].releases.push(index);
                    (end - place) as usize / 8
                }
                (None, Some(&last)) => {
                    self.steps[last].releases.push(index);
                    unknown.push(index);
                    0
                }
                // The memory is filled once, before the loop.
                (None, None) => usize::MAX,
            };
            self.fillings.push(Filling::Tiles { stages, bytes });
        }
        let least = self.stages().filter(|&stages| stages > 0).min().unwrap_or(1);
        for index in unknown {
            self.fillings[index] = Filling::Tiles { stages: least, bytes };
        }
    }

    /// Gives the tiles equal shares of `bytes`, because they are parts of one tile.
    pub fn share(&mut self, bytes: f64) {
        let parts = self.stages().filter(|&stages| stages < usize::MAX).count();
        for filling in &mut self.fillings {
            if let Filling::Tiles { bytes: of_part, .. } = filling {
                *of_part = bytes / parts as f64;
            }
        }
    }

    /// Returns the stages of each tile that the accelerator fills.
    pub fn stages(&self) -> impl Iterator<Item = usize> + '_ {
        self.fillings.iter().filter_map(|filling| match filling {
            Filling::Tiles { stages, .. } => Some(*stages),
            Filling::Copies { .. } => None,
        })
    }

    /// Returns the number of copies that the loop waits for in the iteration that started them.
    pub fn exposed_copies(&self) -> usize {
        self.fillings.iter().filter(|f| matches!(f, Filling::Copies { ahead: 0 })).count()
    }
}

/// Returns the positions that an iteration runs through, without the slow paths behind barriers
/// that are passed at once.
fn path(listing: &Listing, range: &RangeInclusive<usize>) -> Vec<usize> {
    let mut path = Vec::new();
    let mut k = *range.start();
    while k <= *range.end() {
        let instruction = &listing.instructions[k];
        path.push(k);
        let passed = instruction.base() == "BRA" && k < *range.end() && {
            let before = &listing.instructions[k.saturating_sub(10).max(*range.start())..k];
            instruction.guard.as_deref().is_some_and(|guard| {
                before.iter().any(|b| {
                    b.opcode.contains("PHASECHK") && b.operand_list().next() == Some(guard)
                })
            })
        };
        k = match instruction.targets.first() {
            Some(&target) if passed && target > k && target <= *range.end() => target,
            _ => k + 1,
        };
    }
    path
}

/// Returns the constant in the first operand that is an address: 0x34000 of `[UR9+0x34000]`.
fn offset(instruction: &Instruction) -> u64 {
    let address = instruction.operands.split('[').find_map(|part| {
        let inside = part.split_once(']')?.0;
        inside.rsplit_once("+0x")
    });
    address.and_then(|(_, digits)| u64::from_str_radix(digits, 16).ok()).unwrap_or(0)
}
