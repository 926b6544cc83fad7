//! Which slots chunks lie in, as few as possible.

use std::rc::Rc;

use super::visits::Visit;

/// First and last step of some use of a slot.
type Span = (usize, usize);

/// Numbers of the slots for inputs, which are the same on all ranks.
#[derive(Debug)]
pub(super) struct Inputs {
    /// `[visit]`
    numbers: Rc<[usize]>,
    /// How many there are.
    count: usize,
}

impl Inputs {
    pub fn new(visits: &[Visit]) -> Inputs {
        // The last step at which chunks are passed on to another visit.
        let mut passed_on = vec![0; visits.len()];
        for (number, visit) in visits.iter().enumerate().filter(|(_, visit)| visit.source > 0) {
            passed_on[visit.source] = number - 1;
        }
        // From the step at which they leave their source until they were read and passed on. Home
        // counts as a slot that is free after its step, so that those of a ring alternate.
        let input =
            |(number, visit): (usize, &Visit)| Some((visit.leaves, passed_on[number].max(number)));
        let (numbers, count) = free_numbers(&Vec::from_iter(visits.iter().enumerate().map(input)));
        Inputs { numbers: numbers.into(), count }
    }
}

/// Numbers of the slots of one rank; the parts of a chunk have slots of their own. Inputs and sums
/// are numbered independently.
#[derive(Debug)]
pub(super) struct Slots {
    /// `[visit]`
    inputs: Rc<[usize]>,
    /// `[visit]`
    sums: Vec<usize>,
    /// `[step]`
    returned: Vec<usize>,
    /// The first slot for sums that come home; those before are for what passes through.
    first_returned: usize,
    /// Slots of each part.
    stride: usize,
}

impl Slots {
    /// Of a rank from which sums leave for home after the visits that `leave` says, and to which
    /// sums come home from those that `come` says.
    pub fn new(
        visits: &[Visit],
        inputs: &Inputs,
        leave: impl Fn(usize) -> bool,
        come: impl Fn(usize) -> bool,
    ) -> Slots {
        let numbered = || visits.iter().enumerate();
        // From the step of the visit until they were passed on or came home.
        let sum = |(number, visit): (usize, &Visit)| {
            Some((number, if leave(number) { visit.returns } else { number + 1 }))
        };
        // For all that comes home by the same step: from the step after the first of its visits.
        let mut back = vec![None; visits.iter().map(|visit| visit.returns + 1).max().unwrap_or(0)];
        for (number, visit) in numbered().skip(1).filter(|(number, _)| come(*number)) {
            back[visit.returns].get_or_insert((number + 1, visit.returns));
        }
        let (sums, sum_slots) = free_numbers(&Vec::from_iter(numbered().map(sum)));
        let (returned, return_slots) = free_numbers(&back);
        let stride = inputs.count.max(sum_slots + return_slots.max(1));
        let inputs = inputs.numbers.clone();
        Slots { inputs, sums, returned, first_returned: sum_slots, stride }
    }

    /// Where a part of the chunks of a visit lies.
    pub fn input(&self, visit: usize, part: usize) -> usize {
        self.stride * part + self.inputs[visit]
    }

    /// Where the sums of a part lie as long as they are where the visit was.
    pub fn sums(&self, visit: usize, part: usize) -> usize {
        self.stride * part + self.sums[visit]
    }

    /// Where those land that come home by a step, the `index`-th of them.
    pub fn returned(&self, step: usize, index: usize) -> usize {
        self.stride * index + self.first_returned + self.returned[step]
    }
}

/// Gives each span of steps, first and last included, a number that no other has at any of them, and
/// says how many that takes. In the order in which they begin, each takes the number that was given
/// back last, and a new one only if there is none; so they are as few as can be.
fn free_numbers(spans: &[Option<Span>]) -> (Vec<usize>, usize) {
    let mut order: Vec<usize> = (0..spans.len()).filter(|index| spans[*index].is_some()).collect();
    order.sort_by_key(|index| spans[*index]);
    let (mut numbers, mut used_until) = (vec![0; spans.len()], Vec::new());
    for index in order {
        let Some((first, last)) = spans[index] else { continue };
        let free = (0..used_until.len()).filter(|number| used_until[*number] < first);
        let number = free.max_by_key(|number| used_until[*number]).unwrap_or(used_until.len());
        used_until.resize(used_until.len().max(number + 1), last);
        used_until[number] = last;
        numbers[index] = number;
    }
    (numbers, used_until.len())
}
