//! The order of matrix products and exponentials in a loop. The order tells whether the loop
//! computes the scores of the next block during the softmax of the current block.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::ops::Range;

use super::Instruction;

/// An event in the loop of an attention kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A matrix instruction of a product that starts from zero in every iteration, as QKᵀ.
    Fresh,
    /// A matrix instruction that adds to sums carried from one iteration to the next, as PV.
    Carried,
    /// An exponential.
    Exponential,
    /// A wait for matrix instructions.
    Wait,
}

impl Event {
    fn letter(self) -> char {
        match self {
            Self::Fresh => 'Q',
            Self::Carried => 'P',
            Self::Exponential => 'E',
            Self::Wait => 'W',
        }
    }
}

/// The events of one iteration, with runs of equal events counted, printed as `Q8 W P E11 P E20 W`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EventOrder {
    /// Events, and how often each occurs in a row.
    pub runs: Vec<(Event, u32)>,
}

impl fmt::Display for EventOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, &(event, count)) in self.runs.iter().enumerate() {
            let gap = if i == 0 { "" } else { " " };
            write!(f, "{gap}{}", event.letter())?;
            if count > 1 {
                write!(f, "{count}")?;
            }
        }
        Ok(())
    }
}

/// One set of scores and the products with values behind it.
#[derive(Debug, Clone, Copy, Default)]
struct Round {
    /// Exponentials from the first instruction of the scores to the first instruction with values.
    before: u32,
    /// Exponentials between the first and the last instruction with values.
    between: u32,
    values: bool,
    /// Exponentials since the last instruction with values.
    since: u32,
}

impl EventOrder {
    /// Returns the order of the events of a loop's instructions, given in the order of execution.
    ///
    /// This goes through the loop twice, because one iteration may set a sum to zero for the next
    /// iteration.
    pub(super) fn of(body: &[&Instruction]) -> Self {
        let mut chains = Chains::default();
        for instruction in body {
            chains.event(instruction);
        }
        let mut runs: Vec<(Event, u32)> = Vec::new();
        for event in body.iter().filter_map(|instruction| chains.event(instruction)) {
            match runs.last_mut() {
                Some((last, count)) if *last == event => *count += 1,
                _ => runs.push((event, 1)),
            }
        }
        Self { runs }
    }

    /// Whether the loop has scores, products with values and exponentials.
    pub fn is_attention(&self) -> bool {
        let has = |event| self.runs.iter().any(|&(e, _)| e == event);
        has(Event::Fresh) && has(Event::Carried) && has(Event::Exponential)
    }

    /// Whether the next block's QKᵀ is issued before the current block's PV.
    ///
    /// PV needs exponentials of its own scores. If no exponential lies between QKᵀ and PV, then an
    /// earlier iteration computed these scores, and their softmax runs during the matrix products.
    /// If an exponential lies between QKᵀ and PV, the function returns false, even if the
    /// exponential belongs to another iteration. All rounds of an unrolled iteration must satisfy
    /// the condition.
    pub fn qk_before_pv(&self) -> bool {
        self.is_attention() && self.rounds().iter().all(|round| round.before == 0)
    }

    /// Returns the number of exponentials between the first and the last PV instruction of a round.
    pub fn exponentials_between_pv(&self) -> u32 {
        self.rounds().iter().map(|round| round.between).sum()
    }

    /// Returns the rounds. A loop may start anywhere in its cycle, so rounds start at scores behind
    /// values.
    fn rounds(&self) -> Vec<Round> {
        let products: Vec<_> = self.runs.iter().filter(|(e, _)| *e != Event::Wait).collect();
        let matrix = |i: usize| (products[i].0 != Event::Exponential).then_some(products[i].0);
        let before = |i: usize| (0..i).rev().chain((i..products.len()).rev()).find_map(matrix);
        let starts =
            |i: &usize| matrix(*i) == Some(Event::Fresh) && before(*i) == Some(Event::Carried);
        let Some(first) = (0..products.len()).find(starts) else { return Vec::new() };
        let mut rounds = vec![Round::default()];
        for &&(event, count) in products[first..].iter().chain(&products[..first]) {
            let round = rounds.len() - 1;
            match event {
                Event::Fresh if rounds[round].values => rounds.push(Round::default()),
                Event::Carried => {
                    let round = &mut rounds[round];
                    round.between +=
                        if round.values { std::mem::take(&mut round.since) } else { 0 };
                    round.values = true;
                }
                Event::Exponential if rounds[round].values => rounds[round].since += count,
                Event::Exponential => rounds[round].before += count,
                Event::Fresh | Event::Wait => {}
            }
        }
        rounds
    }
}

/// The sums that started from zero in this iteration.
#[derive(Default)]
struct Chains<'a> {
    registers: HashMap<u32, Holds<'a>>,
    /// Addresses of sums in tensor memory, given by the operands that hold the addresses.
    tensor: HashSet<&'a str>,
}

#[derive(Clone, Copy, PartialEq)]
enum Holds<'a> {
    /// A sum that started from zero.
    Fresh,
    /// The present or earlier content of that register.
    Register(u32),
    /// A copy of zero or of a uniform register.
    Other(&'a str),
}

impl<'a> Chains<'a> {
    fn event(&mut self, instruction: &'a Instruction) -> Option<Event> {
        let base = instruction.base();
        if base == "WARPGROUP" && instruction.opcode.contains("DEPBAR") {
            return Some(Event::Wait);
        }
        let operands: Vec<_> = instruction.operand_list().map(unmarked).collect();
        if is_matrix(instruction) {
            let tensor = base.starts_with("UTC");
            let fresh =
                if tensor { self.in_tensor(&operands) } else { self.in_registers(&operands) };
            return Some(if fresh { Event::Fresh } else { Event::Carried });
        }
        let event = is_exponential(instruction).then_some(Event::Exponential);
        // The first operand of an instruction that writes no register is no register.
        let Some(first) = operands.first().and_then(|written| number(written)) else {
            return event;
        };
        if base == "MOV" || instruction.opcode.starts_with("IMAD.MOV") || base == "CS2R" {
            let source = operands.last().copied().unwrap_or_default();
            let copy = number(source).map_or(Holds::Other(source), |number| self.value(number));
            let both = instruction.opcode == "CS2R";
            for written in first..=first + u32::from(both) {
                self.forget(written..written + 1);
                self.registers.insert(written, copy);
            }
        } else {
            // One instruction writes up to four registers, which start at a multiple of their
            // number.
            self.forget(first..(first | 3) + 1);
        }
        event
    }

    /// Whether a product in registers starts from zero. Its operands are the sum, A, then B unless
    /// A's descriptor names both, then the addend.
    fn in_registers(&mut self, operands: &[&'a str]) -> bool {
        let at = |i: usize| operands.get(i).copied().unwrap_or_default();
        let addend = if at(1).starts_with("gdesc") { at(2) } else { at(3) };
        let fresh = number(addend).map_or(addend == "RZ", |first| {
            let sum = self.registers.get(&first) == Some(&Holds::Fresh);
            // Registers that all hold the same value were filled with a constant.
            sum || self.value(first) == self.value(first + 1)
        });
        if let Some(sum) = number(at(0)) {
            self.forget(sum..sum + 4);
            if fresh {
                self.registers.insert(sum, Holds::Fresh);
            }
        }
        fresh
    }

    /// Returns the content of a register, named by the register that it first was in.
    fn value(&self, number: u32) -> Holds<'a> {
        let known = self.registers.get(&number).filter(|&&holds| holds != Holds::Fresh);
        known.copied().unwrap_or(Holds::Register(number))
    }

    /// Whether a product in tensor memory starts from zero. Its operands are A, B, the sum, …, and
    /// whether to add to the sum.
    fn in_tensor(&mut self, operands: &[&'a str]) -> bool {
        let at = |i: usize| operands.get(i).copied().unwrap_or_default();
        // Probabilities may be an A in tensor memory; queries and keys come from shared memory.
        let scores = !at(0).starts_with("tmem") && self.tensor.contains(at(2));
        let fresh = operands.contains(&"!UPT") || scores;
        if fresh {
            self.tensor.insert(at(2));
        } else {
            self.tensor.remove(at(2));
        }
        fresh
    }

    /// Forgets the contents of registers, and a sum in the four registers around the first.
    fn forget(&mut self, written: Range<u32>) {
        let quad = written.start & !3;
        if self.registers.get(&quad) == Some(&Holds::Fresh) {
            self.registers.remove(&quad);
        }
        for number in written {
            self.registers.remove(&number);
        }
    }
}

/// Returns an operand without marks such as `.reuse`.
fn unmarked(operand: &str) -> &str {
    operand.split('.').next().unwrap_or_default()
}

/// Returns the number of a register: 24 for `R24`, `None` for `RZ`.
fn number(register: &str) -> Option<u32> {
    register.strip_prefix('R')?.parse().ok()
}

/// Whether an instruction is a matrix product: `HMMA`, `HGMMA`, `UTCHMMA` and similar ones.
pub(super) fn is_matrix(instruction: &Instruction) -> bool {
    instruction.base().ends_with("MMA")
}

/// Whether an instruction is an exponential.
pub(super) fn is_exponential(instruction: &Instruction) -> bool {
    instruction.opcode.starts_with("MUFU.EX2")
}

#[cfg(test)]
mod tests {
    use super::super::Listing;
    use super::*;

    const SCORES: &str = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT
                          HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], R24, gsb0
                          WARPGROUP.DEPBAR.LE gsb0, 0x0\n";
    const POWERS: &str = "MUFU.EX2 R72, R24\nMUFU.EX2 R73, R25\n";
    const VALUES: &str = "HGMMA.64x128x16.F32.BF16 R88, R72, gdesc[UR4].tnspB, R88\n";

    fn order(code: &str) -> EventOrder {
        let number = |(i, line): (usize, &str)| format!("/*{:04x}*/ {} ;\n", i * 16, line.trim());
        let text: String = code.lines().enumerate().map(number).collect();
        EventOrder::of(&Listing::parse(&text).unwrap().instructions.iter().collect::<Vec<_>>())
    }

    /// Returns the events, whether QKᵀ comes first, and the exponentials between PV.
    fn read(code: &str) -> (String, bool, u32) {
        let order = order(code);
        (order.to_string(), order.qk_before_pv(), order.exponentials_between_pv())
    }

    #[test]
    fn scores_then_their_softmax_then_values_is_serial() {
        let code = [SCORES, POWERS, VALUES, VALUES].concat();
        assert_eq!(read(&code), ("Q2 W E2 P2".into(), false, 0));
        // Values may start while the last exponentials still run: serial all the same.
        let code = [SCORES, POWERS, VALUES, POWERS, VALUES].concat();
        assert_eq!(read(&code), ("Q2 W E2 P E2 P".into(), false, 2));
    }

    #[test]
    fn values_of_the_last_block_right_behind_the_next_scores_are_pipelined() {
        let code = [SCORES, VALUES, POWERS, VALUES, POWERS, VALUES, POWERS].concat();
        assert_eq!(read(&code), ("Q2 W P E2 P E2 P E2".into(), true, 4));
    }

    #[test]
    fn it_does_not_matter_where_the_cycle_starts() {
        let code = [VALUES, POWERS, VALUES, POWERS, SCORES].concat();
        assert_eq!(read(&code), ("P E2 P E2 Q2 W".into(), true, 2));
        let code = [POWERS, VALUES, VALUES, SCORES].concat();
        assert_eq!(read(&code), ("E2 P2 Q2 W".into(), false, 0));
    }

    #[test]
    fn every_round_of_an_unrolled_iteration_counts() {
        let round = [SCORES, VALUES, POWERS, VALUES].concat();
        let serial = [SCORES, POWERS, VALUES].concat();
        let (_, first, between) = read(&[&*round, &round].concat());
        assert_eq!((first, between), (true, 4));
        assert!(!read(&[&*round, &serial].concat()).1);
        assert!(!read(&[&*serial, &round].concat()).1);
    }

    #[test]
    fn sums_filled_with_a_constant_in_the_loop_are_fresh() {
        let product = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR16], R24\n";
        let first = |fill: &str| order(&format!("{fill}{product}{product}")).to_string();
        assert_eq!(first("CS2R R24, SRZ\n"), "Q2");
        assert_eq!(first("MOV R25, RZ\nMOV R24, RZ\n"), "Q2");
        assert_eq!(first("MOV R24, UR7\nIMAD.MOV.U32 R25, RZ, RZ, R24.reuse\n"), "Q2");
        assert_eq!(first("MOV R24, R60\nMOV R25, R61\n"), "P2");
        assert_eq!(first("CS2R R24, SRZ\nFMUL R24, R24, R9\n"), "P2");
        assert_eq!(first(""), "P2");
        // The sum is set to zero behind the products, for the next iteration.
        assert_eq!(order(&format!("{product}CS2R R24, SRZ\n")).to_string(), "Q");
    }

    #[test]
    fn sums_of_single_warps_move_between_registers() {
        let scores = "HMMA.16816.F32.BF16 R220, R192.reuse, R228, RZ
                      HMMA.16816.F32.BF16 R100, R188, R230, R220\n";
        let next = "HMMA.16816.F32.BF16 R96, R92, R72, R100";
        assert_eq!(order(&format!("{scores}{next}")).to_string(), "Q3");
        // A write to any register of a sum ends the sum.
        assert_eq!(order(&format!("{scores}LDS.128 R100, [R4]\n{next}")).to_string(), "Q2 P");
        assert_eq!(order(&format!("{scores}MUFU.EX2 R103, R9\n{next}")).to_string(), "Q2 E P");
        assert_eq!(order(&format!("{scores}STS.128 [R4], R100\n{next}")).to_string(), "Q3");
    }

    #[test]
    fn products_in_tensor_memory_are_told_apart_by_their_first_step() {
        let code = "UTCHMMA gdesc[UR16], gdesc[UR18], tmem[UR32], tmem[UR22], idesc[UR23], !UPT
                    UTCHMMA gdesc[UR6], gdesc[UR4], tmem[UR32], tmem[UR22], idesc[UR23], UPT
                    UTCHMMA tmem[UR26], gdesc[UR22], tmem[UR29], tmem[UR24], idesc[UR25], UPT";
        assert_eq!(read(code), ("Q2 P".into(), false, 0));
    }

    #[test]
    fn a_loop_without_all_three_is_no_attention() {
        assert!(order(&[SCORES, POWERS, VALUES].concat()).is_attention());
        for part in [[SCORES, VALUES], [SCORES, POWERS], [POWERS, VALUES]] {
            let order = order(&part.concat());
            assert!(!order.is_attention() && !order.qk_before_pv(), "{order}");
        }
        assert_eq!(order("NOP"), EventOrder::default());
    }
}
