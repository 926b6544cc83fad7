//! The operations that compute the gradients of a rank's tiles: one for all gradients of a tile, or
//! two. One operation takes five products in place of seven, but it adds to dq in the order in
//! which blocks end, or makes each block wait for those before it.

use burst_attention_kernels::backend::{
    BACKENDS, Backend, Backends, Choice, Kernels, Reason, Refusal, tile,
};
use burst_attention_kernels::cost::{self, Cost};
use burst_attention_kernels::instances::Target;
use burst_attention_kernels::launch::{
    Cast, Features, ForwardResults, KeyGrads, QueryGrads, Rectangle, Rows, Statistics,
    TileOperation,
};

use super::call::Call;
use super::tiles::{element_of, features_of, key_parts, query_parts, rectangle};
use crate::error::Result;
use crate::problem::{Order, Pass, Problem};
use crate::schedule::{Payload, Place, Schedule, Tile};

/// The operations that compute the gradients of a rank's tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GradientOperations {
    /// One for the gradients of keys and values, and one for that of queries, in a fixed order.
    Two,
    /// One for all gradients, which adds to dq at home.
    One {
        /// Whether it adds in a fixed order.
        fixed_order: bool,
    },
}

/// A tile's gradients, without addresses, and how many tiles of the rank have the same.
struct Question {
    rectangle: Rectangle,
    /// Whether delta follows from results at home.
    has_results: bool,
    /// Whether the sums of keys, and those of queries, start with the tile.
    first: [bool; 2],
    count: usize,
}

/// What one of the two ways costs, and which backends compute it.
#[derive(Default)]
struct Answer {
    cost: Option<Cost>,
    /// Whether a library computes a tile.
    by_library: bool,
    /// The refusals of the first operation that a backend refuses.
    refusals: Vec<(&'static str, Refusal)>,
}

impl GradientOperations {
    /// Returns the operations of a rank's backward pass on the GPU of `backends`, and the choice if
    /// there was one. They are one operation where a backend serves each tile and
    ///
    /// - the caller asks for cuDNN, which computes a tile ([`Kernels::Cudnn`]),
    /// - one operation is predicted to take less time than two, or
    /// - nothing is predicted, and the caller asks for any order ([`Order::Any`]).
    ///
    /// # Errors
    /// If CUDA kernels don't take the problem's type.
    pub(super) fn of(
        problem: &Problem,
        schedule: &Schedule,
        backends: Backends,
        order: Order,
        lse_gradient: bool,
    ) -> Result<(GradientOperations, Option<Choice>)> {
        // Of this library's kernels, only the two of a tile have a fixed order.
        let is_own_and_fixed = order == Order::Fixed && backends.kernels == Kernels::Tile;
        if schedule.pass == Pass::Forward || is_own_and_fixed {
            return Ok((GradientOperations::Two, None));
        }
        let one = GradientOperations::One { fixed_order: order == Order::Fixed };
        let questions = questions(problem, schedule, lse_gradient)?;
        let two = GradientOperations::Two;
        let answer_of_two = two.answer(problem, &questions, backends);
        let of_two = answer_of_two.ok().and_then(|answer| answer.cost);
        let answer = match travels(schedule) {
            true => Err(Refusal::because("sums of dq travel")),
            false => one.answer(problem, &questions, backends),
        };
        let (chosen, cost, refusals) = match answer {
            Err(refusal) => (two, of_two, vec![(one.name(), refusal)]),
            Ok(answer) => match slower(order, (problem, backends), &answer, of_two) {
                Ok(refusal) => (one, answer.cost, vec![(two.name(), refusal)]),
                Err(refusal) => {
                    (two, of_two, [vec![(one.name(), refusal)], answer.refusals].concat())
                }
            },
        };
        let backend = Some(chosen.name());
        Ok((chosen, Some(Choice { operation: "gradients", backend, cost, refusals })))
    }

    /// Whether one operation computes all gradients of some rank's tiles on some GPU.
    pub(super) fn may_fuse(call: &Call, schedules: &[Schedule]) -> bool {
        let fuses = |schedule, target| {
            let backends =
                Backends { all: BACKENDS, target, kernels: call.kernels, cudnn: None, scratch: 0 };
            let (order, lse_gradient) = (call.backward_order, call.lse_gradient);
            let found =
                GradientOperations::of(&call.problem, schedule, backends, order, lse_gradient);
            found.is_ok_and(|(operations, _)| operations.are_fused())
        };
        let on_any = |schedule| Target::ALL.iter().any(|&target| fuses(schedule, target));
        schedules.iter().any(on_any)
    }

    /// Whether one operation computes all gradients of a tile.
    pub fn are_fused(self) -> bool {
        self != GradientOperations::Two
    }

    /// Whether sums have a fixed order.
    pub fn have_fixed_order(self) -> bool {
        self != GradientOperations::One { fixed_order: false }
    }

    /// Returns the name that users read.
    const fn name(self) -> &'static str {
        match self {
            GradientOperations::Two => "two operations",
            GradientOperations::One { fixed_order: true } => "one operation in a fixed order",
            GradientOperations::One { fixed_order: false } => "one operation in any order",
        }
    }

    /// Returns an operation that computes all gradients of a tile, without addresses: a question to
    /// a backend.
    pub(super) fn all_gradients(
        self,
        rectangle: Rectangle,
        features: Features,
        has_results: bool,
    ) -> KeyGrads {
        KeyGrads {
            fixed_order: self.have_fixed_order(),
            results: has_results.then(ForwardResults::default),
            ..KeyGrads::fused(rectangle, features)
        }
    }

    /// Returns the operations of a tile.
    fn of_tile(self, problem: &Problem, question: &Question) -> Vec<TileOperation> {
        let Question { rectangle, has_results, first: [first, starts_queries], .. } = *question;
        let all = self.all_gradients(rectangle, features_of(problem), has_results);
        let all = KeyGrads { first, ..all };
        if self.are_fused() {
            return vec![all.into()];
        }
        let (at, rows) = (Statistics::default(), Rows::default());
        let queries = QueryGrads {
            rectangle,
            features: all.features,
            q: rows,
            k: rows,
            v: rows,
            dout: rows,
            lse_log2: at,
            delta: at,
            dq_acc: Some(rows),
            dq: None,
            dslopes: None,
            first: starts_queries,
            last: false,
        };
        vec![KeyGrads { dq_acc: None, ..all }.into(), queries.into()]
    }

    /// Returns what the operations of all tiles cost.
    ///
    /// # Errors
    /// The refusal of the first operation that no backend serves.
    fn answer(
        self,
        problem: &Problem,
        questions: &[Question],
        backends: Backends,
    ) -> std::result::Result<Answer, Refusal> {
        let mut all = Answer::default();
        let mut are_known = true;
        for question in questions {
            for operation in self.of_tile(problem, question) {
                let (backend, choice) = backends.choose(&operation);
                let Some(Backend { name, .. }) = backend else {
                    let reason = |(name, refusal): &_| format!("{name}: {refusal}");
                    let reasons: Vec<_> = choice.refusals.iter().map(reason).collect();
                    return Err(Refusal::Unserved(Reason(reasons.join(", ").into())));
                };
                all.by_library |= *name != tile::NAME;
                if all.refusals.is_empty() {
                    all.refusals = choice.refusals;
                }
                let times =
                    |cost: Cost| Cost { seconds: cost.seconds * question.count as f64, ..cost };
                are_known &= choice.cost.is_some();
                let sum = choice.cost.map(times);
                all.cost = all.cost.map_or(sum, |all| sum.map(|sum| all + sum));
            }
        }
        let cost = match all.by_library {
            // The fused kernel's cost has them in it.
            false => all.cost,
            true => {
                all.cost.zip(passes_over_dq(problem, backends.target)).map(|(one, more)| one + more)
            }
        };
        Ok(Answer { cost: cost.filter(|_| are_known), ..all })
    }
}

/// Returns what it costs to set the sums of dq to 0 before a library's results are added to them, and
/// to write dq afterwards. A pass over two float32 sums moves as many bytes.
fn passes_over_dq(problem: &Problem, target: Target) -> Option<Cost> {
    let at = Rows::default();
    let pass = Cast {
        batch: problem.batch,
        rows: problem.q_len,
        heads: problem.heads,
        head_dim: problem.head_dim,
        element: element_of(problem.dtype).ok()?,
        a: at,
        b: Some(at),
        out: at,
        scale: 1.0,
    };
    cost::own(&pass.into(), target)
}

/// Decides between one operation, where backends serve it for all tiles, and two. Returns why two
/// are not taken.
///
/// # Errors
/// Why one is not taken.
fn slower(
    order: Order,
    (problem, backends): (&Problem, Backends),
    one: &Answer,
    two: Option<Cost>,
) -> std::result::Result<Refusal, Refusal> {
    if backends.kernels == Kernels::Cudnn && one.by_library {
        return Ok(Refusal::because("cudnn was asked for"));
    }
    // On an H100, in nine of ten shapes; a prediction would let it compute short rows.
    let width = problem.head_dim.max(problem.value_dim);
    if !one.by_library && backends.target == Target::Sm90 && width > 64 {
        return Err(Refusal::because("measured slower at 128 columns"));
    }
    match one.cost.zip(two) {
        Some((one, two)) if one.seconds < two.seconds => Ok(Refusal::Slower(two)),
        Some((one, _)) => Err(Refusal::Slower(one)),
        None if order == Order::Any && !one.by_library => Ok(Refusal::UNPREDICTED),
        None => Err(Refusal::UNPREDICTED),
    }
}

/// Whether sums of dq travel. No other operation than that of queries can add to them: they do not
/// start with zeros, and other ranks scale them.
fn travels(schedule: &Schedule) -> bool {
    let mut merges = schedule.steps.iter().flat_map(|step| &step.merges);
    let mut tiles = schedule.steps.iter().flat_map(|step| &step.tiles);
    merges.any(|merge| merge.chunk.payload == Payload::QueryGrads)
        || tiles.any(|tile| tile.query_state.place != Place::Home)
}

/// Returns the parts of all tiles, those alike once.
fn questions(problem: &Problem, schedule: &Schedule, lse_gradient: bool) -> Result<Vec<Question>> {
    let element = element_of(problem.dtype)?;
    let mut found: Vec<Question> = Vec::new();
    for tile in schedule.steps.iter().flat_map(|step| &step.tiles) {
        let Tile { queries, keys, band, .. } = tile;
        if queries.rows.is_empty() || keys.rows.is_empty() {
            continue;
        }
        let has_results = !lse_gradient && queries.place == Place::Home;
        let first = [tile.key_state.first, tile.query_state.first];
        let key_parts = key_parts(problem, &keys.rows);
        for query_part in query_parts(problem, &queries.rows) {
            for key_part in &key_parts {
                let rectangle = rectangle(problem, element, &query_part, key_part, *band);
                let new = Question { rectangle, has_results, first, count: 1 };
                match found.iter_mut().find(|known| known.is_like(&new)) {
                    Some(known) => known.count += 1,
                    None => found.push(new),
                }
            }
        }
    }
    Ok(found)
}

impl Question {
    fn is_like(&self, other: &Question) -> bool {
        (self.rectangle, self.has_results, self.first)
            == (other.rectangle, other.has_results, other.first)
    }
}
