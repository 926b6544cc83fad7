//! Control flow of a listing: basic blocks and natural loops.
//!
//! Not every branch backwards closes a loop: compilers move slow paths (such as a second look at a
//! closed barrier) behind the kernel and branch back from there. So a branch closes a loop if its
//! target dominates it, which means that every way from the entry leads through the target.
//! Compilers may also jump into the middle of a loop that contains other loops. Then the loop has
//! the blocks that its header reaches and that lead back to the header.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Range, RangeInclusive};

use super::order::is_matrix;
use super::{Error, Instruction, Listing};

/// A natural loop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Loop {
    /// Position in the listing of the instruction that every iteration starts with.
    pub(super) header: usize,
    /// Positions of all its instructions, inner loops included, in the order of execution as far
    /// as the listing tells it: first from the header on, then before the header.
    pub(super) body: Vec<usize>,
    /// The smallest loop around it, as an index into the list of loops.
    pub(super) parent: Option<usize>,
}

impl Loop {
    /// Returns its instructions without the instructions of inner loops.
    pub(super) fn own(&self, index: usize, loops: &[Loop]) -> Vec<usize> {
        let inner = loops.iter().filter(|inner| inner.parent == Some(index));
        let inner: BTreeSet<_> = inner.flat_map(|inner| &inner.body).collect();
        self.body.iter().copied().filter(|at| !inner.contains(at)).collect()
    }
}

/// Returns the loops of a listing, by the address of their header.
pub(super) fn loops(listing: &Listing) -> Result<Vec<Loop>, Error> {
    let flow = Flow::new(listing)?;
    let order = flow.reverse_postorder();
    let dominators = flow.dominators(&order);
    let dominates = |above: usize, mut block: usize| {
        while block != above && dominators[block] != block {
            block = dominators[block];
        }
        block == above
    };
    let position: BTreeMap<_, _> = order.iter().enumerate().map(|(i, &block)| (block, i)).collect();
    let mut bodies: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for &block in &order {
        for &next in flow.successors[block].iter().filter(|&n| position[n] <= position[&block]) {
            let mut body = flow.natural_loop(next, block);
            if !dominates(next, block) {
                let reached = flow.reached(next);
                body.retain(|block| reached.contains(block));
            }
            bodies.entry(next).or_default().extend(body);
        }
    }
    let list = |(&header, body): (&usize, &BTreeSet<usize>)| Loop {
        header: flow.blocks[header].start,
        body: body
            .range(header..)
            .chain(body.range(..header))
            .flat_map(|&b| flow.blocks[b].clone())
            .collect(),
        parent: bodies
            .iter()
            .enumerate()
            .filter(|(_, (other, around))| **other != header && around.contains(&header))
            .min_by_key(|(_, (_, around))| around.len())
            .map(|(index, _)| index),
    };
    Ok(bodies.iter().map(list).collect())
}

impl Listing {
    /// Returns the innermost loops with matrix products: positions from the first instruction of an
    /// iteration to the branch that closes it. Other instructions of a loop are slow paths.
    ///
    /// # Errors
    /// If the control flow is not understood.
    pub fn matrix_loops(&self) -> Result<Vec<RangeInclusive<usize>>, Error> {
        let all = loops(self)?;
        let at = |at: &usize| &self.instructions[*at];
        let with_products = |found: &Loop| found.body.iter().any(|i| is_matrix(at(i)));
        let around = |index: usize| std::iter::successors(all[index].parent, |&i| all[i].parent);
        let inner = (0..all.len()).filter(|&i| with_products(&all[i]));
        let outer: BTreeSet<usize> = inner.clone().flat_map(around).collect();
        let range = |found: &Loop| {
            let back = |i: &usize| at(i).targets.contains(&found.header) && !at(i).always();
            let last = found.body.iter().copied().filter(|&i| i > found.header).filter(back).max();
            last.map(|last| found.header..=last)
        };
        Ok(inner.filter(|i| !outer.contains(i)).filter_map(|i| range(&all[i])).collect())
    }
}

struct Flow {
    blocks: Vec<Range<usize>>,
    successors: Vec<Vec<usize>>,
    /// Predecessors of each block that can be reached.
    predecessors: Vec<Vec<usize>>,
    /// Blocks where execution can start without a branch in the listing: functions.
    entries: Vec<usize>,
}

impl Flow {
    fn new(listing: &Listing) -> Result<Self, Error> {
        let instructions = &listing.instructions;
        let count = instructions.len();
        let mut nexts = Vec::with_capacity(count);
        for at in 0..count {
            nexts.push(successors(instructions, at)?);
        }
        let mut starts: BTreeSet<_> = listing.functions.iter().map(|&(_, at)| at).collect();
        starts.insert(0);
        starts.retain(|&at| at < count);
        starts.extend(instructions.iter().filter(|i| i.base() == "CALL").flat_map(|i| &i.targets));
        let entries = starts.clone();
        for (at, next) in nexts.iter().enumerate().filter(|(at, next)| next[..] != [at + 1]) {
            starts.extend(next);
            starts.insert(at + 1);
        }
        starts.insert(count);
        let bounds: Vec<_> = starts.into_iter().collect();
        let blocks: Vec<_> = bounds.windows(2).map(|pair| pair[0]..pair[1]).collect();
        let block_at = |at: &usize| bounds.partition_point(|start| start <= at) - 1;
        let last = |block: &Range<usize>| nexts[block.end - 1].iter().map(block_at).collect();
        let successors: Vec<Vec<usize>> = blocks.iter().map(last).collect();
        let mut predecessors = vec![Vec::new(); blocks.len()];
        let entries = entries.iter().map(block_at).collect();
        let mut flow = Self { blocks, successors, predecessors: Vec::new(), entries };
        for block in flow.reverse_postorder() {
            flow.successors[block].iter().for_each(|&next| predecessors[next].push(block));
        }
        flow.predecessors = predecessors;
        Ok(flow)
    }

    /// Returns every block that can be reached, each before its successors unless a loop forbids
    /// it.
    fn reverse_postorder(&self) -> Vec<usize> {
        let mut seen = vec![false; self.blocks.len()];
        let mut order = Vec::new();
        for &entry in self.entries.iter().rev() {
            let mut stack = vec![(entry, 0)];
            if std::mem::replace(&mut seen[entry], true) {
                continue;
            }
            while let Some((block, edge)) = stack.pop() {
                match self.successors[block].get(edge) {
                    Some(&next) => {
                        stack.push((block, edge + 1));
                        if !std::mem::replace(&mut seen[next], true) {
                            stack.push((next, 0));
                        }
                    }
                    None => order.push(block),
                }
            }
        }
        order.reverse();
        order
    }

    /// Returns the immediate dominator of every block (Cooper, Harvey and Kennedy 2001, "A Simple,
    /// Fast Dominance Algorithm"). An entry, and a block that several entries reach, has itself.
    fn dominators(&self, order: &[usize]) -> Vec<usize> {
        let root = self.blocks.len();
        let mut rank = vec![usize::MAX; root + 1];
        order.iter().enumerate().for_each(|(i, &block)| rank[block] = i + 1);
        rank[root] = 0;
        let mut above: Vec<Option<usize>> = vec![None; root + 1];
        above[root] = Some(root);
        let meet = |above: &[Option<usize>], mut a: usize, mut b: usize| {
            while a != b {
                let lower = if rank[a] > rank[b] { &mut a } else { &mut b };
                *lower = above[*lower].unwrap_or(root);
            }
            a
        };
        let mut changed = true;
        while changed {
            changed = false;
            for &block in order {
                let entry = self.entries.contains(&block).then_some(root);
                let known =
                    self.predecessors[block].iter().copied().filter(|&p| above[p].is_some());
                let new = known.chain(entry).reduce(|a, b| meet(&above, a, b));
                changed |= std::mem::replace(&mut above[block], new) != new;
            }
        }
        let own =
            |(block, above): (usize, Option<usize>)| above.filter(|&a| a != root).unwrap_or(block);
        above.into_iter().take(root).enumerate().map(own).collect()
    }

    /// Returns `header`, `last` and the blocks from which `last` is reached without passing
    /// `header`.
    fn natural_loop(&self, header: usize, last: usize) -> BTreeSet<usize> {
        let mut body = BTreeSet::from([header]);
        let mut rest = vec![last];
        while let Some(block) = rest.pop() {
            if body.insert(block) {
                rest.extend(&self.predecessors[block]);
            }
        }
        body
    }

    /// Returns the blocks that a block reaches, itself included.
    fn reached(&self, from: usize) -> BTreeSet<usize> {
        let mut reached = BTreeSet::new();
        let mut rest = vec![from];
        while let Some(block) = rest.pop() {
            if reached.insert(block) {
                rest.extend(&self.successors[block]);
            }
        }
        reached
    }
}

/// Returns the positions where execution can continue behind an instruction.
fn successors(instructions: &[Instruction], at: usize) -> Result<Vec<usize>, Error> {
    let instruction = &instructions[at];
    let behind = (at + 1 < instructions.len()).then_some(at + 1);
    // A predicate may also stand before the target, as in `BRA.U UP0, `(.L_x_0)`.
    let always = instruction.always() && !instruction.operand_list().any(is_predicate);
    let unknown = || {
        let text = format!("{} {}", instruction.opcode, instruction.operands);
        Error::Branch { address: instruction.address, text }
    };
    let targets = instruction.targets.clone();
    let (leaves, targets) = match instruction.base() {
        "EXIT" | "RET" | "KILL" => (always, Vec::new()),
        "BRA" | "BRX" | "BRXU" | "JMP" | "JMX" | "JMXU" if targets.is_empty() => {
            return Err(unknown());
        }
        "BRA" | "JMP" => (always && !instruction.opcode.contains(".DIV"), targets),
        "BRX" | "BRXU" | "JMX" | "JMXU" => (true, targets),
        "BSYNC" => (always, vec![reconvergence(instructions, at).ok_or_else(unknown)?]),
        // A call, or the start of a region whose end is named: the next instruction follows.
        _ => (false, Vec::new()),
    };
    Ok(targets.into_iter().chain(behind.filter(|_| !leaves)).collect())
}

fn is_predicate(operand: &str) -> bool {
    let name = operand.trim_start_matches('!').trim_start_matches('U');
    let number = name.strip_prefix('P').unwrap_or_default();
    !number.is_empty() && number.chars().all(|c| c.is_ascii_digit())
}

/// Returns where threads that meet at a `BSYNC` continue: at the label of the last `BSSY` on its
/// register.
fn reconvergence(instructions: &[Instruction], at: usize) -> Option<usize> {
    let register = instructions[at].operand_list().next();
    let mut before = instructions[..at].iter().rev();
    let start = before.find(|i| i.base() == "BSSY" && i.operand_list().next() == register);
    start.and_then(|start| start.targets.first().copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a listing of instructions without addresses. Lines that end in a colon are labels.
    fn listing(code: &str) -> Listing {
        let mut address = 0;
        let number = |line: &str| {
            if line.ends_with(':') {
                return format!("{line}\n");
            }
            address += 16;
            format!("/*{:04x}*/ {line} ;\n", address - 16)
        };
        let text: String =
            code.lines().map(str::trim).filter(|l| !l.is_empty()).map(number).collect();
        Listing::parse(&text).unwrap()
    }

    fn shapes(code: &str) -> Vec<(usize, Vec<usize>, Option<usize>)> {
        let loops = loops(&listing(code)).unwrap();
        loops.into_iter().map(|l| (l.header, l.body, l.parent)).collect()
    }

    #[test]
    fn a_predicated_branch_back_closes_a_loop() {
        let code = "MOV R0, RZ\nA:\nIADD3 R0, R0, 1, RZ\n@!P0 BRA `(A)\nEXIT";
        assert_eq!(shapes(code), [(1, vec![1, 2], None)]);
    }

    #[test]
    fn a_predicate_among_the_operands_lets_the_branch_fall_through() {
        let code = "A:\nNOP\nB:\nNOP\nBRA.U !UP0, `(B)\nBRA P1, `(A)\nEXIT";
        assert_eq!(shapes(code), [(0, vec![0, 1, 2, 3], None), (1, vec![1, 2], Some(0))]);
    }

    #[test]
    fn straight_code_and_branches_ahead_are_no_loops() {
        assert_eq!(shapes("MOV R0, RZ\n@P0 BRA `(A)\nMOV R0, R1\nA:\nEXIT"), []);
    }

    #[test]
    fn nested_loops_know_the_smallest_loop_around_them() {
        let code = "A:\nMOV R0, RZ\nB:\nMOV R1, RZ\nC:\nNOP\n@P0 BRA `(C)\n@P1 BRA `(B)\n\
                    @P2 BRA `(A)\nEXIT";
        let expected = [
            (0, vec![0, 1, 2, 3, 4, 5], None),
            (1, vec![1, 2, 3, 4], Some(0)),
            (2, vec![2, 3], Some(1)),
        ];
        assert_eq!(shapes(code), expected);
        let loops = loops(&listing(code)).unwrap();
        assert_eq!(loops[0].own(0, &loops), [0, 5]);
        assert_eq!(loops[1].own(1, &loops), [1, 4]);
    }

    #[test]
    fn a_slow_path_behind_the_kernel_is_part_of_the_loop_it_returns_to() {
        // The branch from S back to R closes no loop; the wait at S is a loop.
        let code = "NOP\nA:\nSYNCS P0, R1\n@!P0 BRA `(S)\nR:\nNOP\n@P1 BRA `(A)\nEXIT\n\
                    S:\nSYNCS P0, R1\n@!P0 BRA `(S)\nBRA `(R)";
        let expected = [(1, vec![1, 2, 3, 4, 6, 7, 8], None), (6, vec![6, 7], Some(0))];
        assert_eq!(shapes(code), expected);
    }

    #[test]
    fn two_branches_to_one_header_are_one_loop() {
        let code = "A:\nNOP\n@P0 BRA `(A)\nNOP\n@P1 BRA `(A)\nEXIT";
        assert_eq!(shapes(code), [(0, vec![0, 1, 2, 3], None)]);
    }

    #[test]
    fn threads_that_meet_go_on_where_their_region_ends() {
        // The region starts in the loop and ends outside: the wait is no part of the loop.
        let code = "A:\nBSSY B0, `(E)\n@P0 BRA `(X)\n@P1 BRA `(A)\nX:\nBSYNC B0\nNOP\nE:\nEXIT";
        assert_eq!(shapes(code), [(0, vec![0, 1, 2], None)]);
        // The instruction behind the wait is not the next one to run.
        assert_eq!(shapes("A:\nBSSY B0, `(E)\nBSYNC B0\nBRA `(A)\nE:\nEXIT"), []);
        let error = loops(&listing("BSYNC B0\nEXIT")).unwrap_err();
        assert!(matches!(error, Error::Branch { address: 0, .. }), "{error}");
    }

    #[test]
    fn loops_with_products_end_where_they_are_closed() {
        let code = "NOP\nA:\nNOP\nB:\nHGMMA R0\n@!P0 BRA `(S)\nR:\n@P1 BRA `(B)\n@P2 BRA `(A)\n\
                    C:\nNOP\n@P1 BRA `(C)\nEXIT\nS:\nNOP\nBRA `(R)";
        assert_eq!(listing(code).matrix_loops(), Ok(vec![2..=4]));
    }

    #[test]
    fn calls_come_back_and_their_functions_have_loops_of_their_own() {
        let code = "A:\nCALL.REL.NOINC `(F)\n@P0 BRA `(A)\nEXIT\nF:\nNOP\n@P0 BRA `(F)\n\
                    RET.REL.NODEC R2 `(F)";
        assert_eq!(shapes(code), [(0, vec![0, 1], None), (3, vec![3, 4], None)]);
    }

    #[test]
    fn a_loop_entered_at_two_places_is_what_comes_back_to_its_header() {
        let code = "@P0 BRA `(B)\nA:\nNOP\nB:\nNOP\n@P1 BRA `(A)\nEXIT";
        let [(header, body, None)] = &shapes(code)[..] else { panic!("one loop") };
        assert!([1, 2].contains(header));
        let body: BTreeSet<_> = body.iter().copied().collect();
        assert_eq!(body, BTreeSet::from([1, 2, 3]));
    }

    #[test]
    fn a_jump_table_needs_its_targets() {
        let error = loops(&listing("BRX R4 -0x10\nEXIT")).unwrap_err();
        assert!(matches!(error, Error::Branch { address: 0, .. }), "{error}");
    }
}
