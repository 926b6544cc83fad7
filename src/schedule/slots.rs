//! Which slots hold chunks, as few as possible.

use std::rc::Rc;

use super::placement::Placement;

/// First and last step of one use of a slot.
type Span = (usize, usize);

/// The slot of each placement's inputs, which is the same on all ranks.
pub(super) struct InputSlots {
    numbers: Rc<[usize]>,
    count: usize,
}

impl InputSlots {
    pub fn new(placements: &[Placement]) -> InputSlots {
        // The last step at which chunks leave for another placement.
        let mut passed_on = vec![0; placements.len()];
        for (number, to) in placements.iter().enumerate().filter(|(_, to)| to.source > 0) {
            passed_on[to.source] = number - 1;
        }
        // A chunk uses its slot from the step at which it leaves its source until the rank has used
        // it and sent it on. Home counts as a slot that is free after its step, so that a ring
        // alternates between two slots.
        let span = |(number, placement): (usize, &Placement)| {
            Some((placement.leaves, passed_on[number].max(number)))
        };
        let spans = placements.iter().enumerate().map(span);
        let (numbers, count) = free_numbers(&Vec::from_iter(spans));
        InputSlots { numbers: numbers.into(), count }
    }
}

/// The slots of one rank. Each row range of a chunk has slots of its own. Inputs and accumulators
/// have separate numbers.
pub(super) struct Slots {
    /// `[placement]`: the slot of the inputs.
    inputs: Rc<[usize]>,
    /// `[placement]`: the slot of the accumulators.
    travelling: Vec<usize>,
    /// `[step]`: the slot of the accumulators that come home by the step, after the slots of
    /// travelling ones.
    returned: Vec<usize>,
    /// The number of slots of travelling accumulators.
    first_returned: usize,
    /// The number of slots of each row range.
    stride: usize,
}

impl Slots {
    /// The slots of a rank. `leave` tells whether accumulators leave it for home after a placement,
    /// and `come` whether accumulators of its own rows come home from a placement.
    pub fn new(
        placements: &[Placement],
        inputs: &InputSlots,
        leave: impl Fn(usize) -> bool,
        come: impl Fn(usize) -> bool,
    ) -> Slots {
        let numbered = || placements.iter().enumerate();
        // An accumulator uses its slot from the placement's step until it has gone on or come home.
        let travelling = |(number, placement): (usize, &Placement)| {
            Some((number, if leave(number) { placement.returns } else { number + 1 }))
        };
        // All accumulators that come home by one step share a slot number, which they use from the
        // step after the first of their placements.
        let steps = placements.iter().map(|placement| placement.returns + 1).max().unwrap_or(0);
        let mut back = vec![None; steps];
        for (number, placement) in numbered().skip(1).filter(|(number, _)| come(*number)) {
            back[placement.returns].get_or_insert((number + 1, placement.returns));
        }
        let (travelling, count) = free_numbers(&Vec::from_iter(numbered().map(travelling)));
        let (returned, return_count) = free_numbers(&back);
        let stride = inputs.count.max(count + return_count.max(1));
        let inputs = inputs.numbers.clone();
        Slots { inputs, travelling, returned, first_returned: count, stride }
    }

    /// The slot of the inputs of a row range at a placement.
    pub fn input(&self, placement: usize, range: usize) -> usize {
        self.stride * range + self.inputs[placement]
    }

    /// The slot of the accumulator of a row range, from a placement on until it moves.
    pub fn travelling(&self, placement: usize, range: usize) -> usize {
        self.stride * range + self.travelling[placement]
    }

    /// The slot of the `index`-th accumulator that comes home by a step.
    pub fn returned(&self, step: usize, index: usize) -> usize {
        self.stride * index + self.first_returned + self.returned[step]
    }
}

/// Gives each span of steps, first and last included, a number that no overlapping span has.
/// Returns the numbers and how many there are, which is as few as possible: in the order in which
/// spans begin, each takes the number that became free last, or a new one if none is free.
fn free_numbers(spans: &[Option<Span>]) -> (Vec<usize>, usize) {
    let mut order: Vec<(Span, usize)> =
        (0..spans.len()).filter_map(|index| Some((spans[index]?, index))).collect();
    order.sort_unstable();
    let (mut numbers, mut used_until) = (vec![0; spans.len()], Vec::new());
    for ((first, last), index) in order {
        let free = (0..used_until.len()).filter(|number| used_until[*number] < first);
        let number = free.max_by_key(|number| used_until[*number]).unwrap_or(used_until.len());
        used_until.resize(used_until.len().max(number + 1), last);
        used_until[number] = last;
        numbers[index] = number;
    }
    (numbers, used_until.len())
}
