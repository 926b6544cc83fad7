//! Choices of a backend, as users may read them.

use std::borrow::Cow;
use std::fmt;

use crate::cost::{Cost, Source};

/// Shows a time and where it comes from: it is always predicted, from rates of each kind.
impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let from = match self.source {
            Source::Measured => "measured rates",
            Source::Published => "published rates",
            Source::Predicted => "estimated rates",
        };
        let millis = 1e3 * self.seconds;
        let digits = if millis < 1.0 { 3 } else { 2 };
        write!(f, "{millis:.digits$} ms predicted from {from}")
    }
}

/// The reason why a backend does not compute an operation: a clause without a full stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reason(pub Cow<'static, str>);

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// By how much another backend must be predicted to be faster than this library's own kernels to take
/// their place: about as much as predictions are off.
pub const MARGIN: f64 = 0.02;

/// Why something else computes an operation.
#[derive(Debug, Clone, PartialEq)]
pub enum Refusal {
    /// It does not compute the operation.
    Unserved(Reason),
    /// It would take longer.
    Slower(Cost),
    /// It would take less time than this library's own kernels, but by less than [`MARGIN`].
    Close(Cost),
}

impl Refusal {
    /// The refusal where times can't be compared.
    pub const UNPREDICTED: Refusal = Refusal::because("no time is predicted");

    /// Returns the refusal with a reason that a compiler knows.
    pub const fn because(reason: &'static str) -> Refusal {
        Refusal::Unserved(Reason(Cow::Borrowed(reason)))
    }

    /// Returns the predicted cost, if the backend was refused for its cost.
    pub fn cost(&self) -> Option<Cost> {
        match self {
            Refusal::Slower(cost) | Refusal::Close(cost) => Some(*cost),
            Refusal::Unserved(_) => None,
        }
    }

    /// Whether both say the same but for costs.
    fn is_like(&self, other: &Refusal) -> bool {
        match (self, other) {
            (Refusal::Slower(_), Refusal::Slower(_)) | (Refusal::Close(_), Refusal::Close(_)) => {
                true
            }
            _ => self == other,
        }
    }

    fn cost_mut(&mut self) -> Option<&mut Cost> {
        match self {
            Refusal::Slower(cost) | Refusal::Close(cost) => Some(cost),
            Refusal::Unserved(_) => None,
        }
    }

    /// Returns the reason in words.
    pub fn reason(&self) -> &str {
        match self {
            Refusal::Unserved(reason) => &reason.0,
            Refusal::Slower(_) => "slower",
            Refusal::Close(_) => "hardly faster",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.reason())?;
        self.cost().map_or(Ok(()), |cost| write!(f, ", {cost}"))
    }
}

/// What computes an operation, and why others do not.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The name of the operation.
    pub operation: &'static str,
    /// The name of the backend; `None` if all refuse.
    pub backend: Option<&'static str>,
    /// What the operation costs, where that is predicted.
    pub cost: Option<Cost>,
    /// The names of the other backends, with the reasons why they do not compute the operation.
    pub refusals: Vec<(&'static str, Refusal)>,
}

impl Choice {
    /// Whether both say the same but for costs.
    fn is_like(&self, other: &Choice) -> bool {
        let mut pairs = self.refusals.iter().zip(&other.refusals);
        (self.operation, self.backend) == (other.operation, other.backend)
            && self.cost.is_some() == other.cost.is_some()
            && self.refusals.len() == other.refusals.len()
            && pairs.all(|(one, other)| one.0 == other.0 && one.1.is_like(&other.1))
    }

    /// Returns all costs.
    fn costs_mut(&mut self) -> impl Iterator<Item = &mut Cost> {
        let refused = self.refusals.iter_mut().filter_map(|(_, refusal)| refusal.cost_mut());
        self.cost.iter_mut().chain(refused)
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} by {}", self.operation, self.backend.unwrap_or("none"))?;
        if let Some(cost) = self.cost {
            write!(f, ", {cost}")?;
        }
        if self.refusals.is_empty() {
            return Ok(());
        }
        let refusals = self.refusals.iter().map(|(name, refusal)| format!("{name}: {refusal}"));
        write!(f, " ({})", refusals.collect::<Vec<_>>().join("; "))
    }
}

/// Choices that were made, each with the number of operations. Choices that differ in costs alone
/// count as one.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Choices(Vec<(Choice, usize)>);

impl Choices {
    /// Adds a choice for `count` operations. Its costs are sums over all of them.
    pub fn add(&mut self, mut choice: Choice, count: usize) {
        match self.0.iter_mut().find(|(known, _)| known.is_like(&choice)) {
            Some((known, all)) => {
                let pairs = known.costs_mut().zip(choice.costs_mut());
                pairs.for_each(|(sum, cost)| *sum = *sum + *cost);
                *all += count;
            }
            None => self.0.push((choice, count)),
        }
    }

    /// Adds all of `other`.
    pub fn extend(&mut self, other: Choices) {
        other.0.into_iter().for_each(|(choice, count)| self.add(choice, count));
    }

    /// Returns the choices in the order in which they first came, each with its number of
    /// operations. Costs are means over these operations.
    pub fn iter(&self) -> impl Iterator<Item = (Choice, usize)> {
        self.0.iter().map(|(sums, count)| {
            let mut choice = sums.clone();
            choice.costs_mut().for_each(|cost| cost.seconds /= *count as f64);
            (choice, *count)
        })
    }

    /// Whether no choice was made.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether both list the same choices but for costs and numbers, which differ from rank to rank.
    pub fn is_like(&self, other: &Choices) -> bool {
        let mut pairs = self.0.iter().zip(&other.0);
        self.0.len() == other.0.len() && pairs.all(|(one, other)| one.0.is_like(&other.0))
    }
}

impl From<Choice> for Choices {
    fn from(choice: Choice) -> Choices {
        Choices(vec![(choice, 1)])
    }
}

/// Lists the choices without their numbers, which differ from rank to rank.
impl fmt::Display for Choices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all: Vec<_> = self.iter().map(|(choice, _)| choice.to_string()).collect();
        f.write_str(&all.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(backend: &'static str, seconds: f64, slower: f64) -> Choice {
        let cost = |seconds| Cost { seconds, launches: 1, source: Source::Measured };
        let refusals = vec![("other", Refusal::Slower(cost(slower)))];
        Choice { operation: "forward", backend: Some(backend), cost: Some(cost(seconds)), refusals }
    }

    #[test]
    fn choices_that_differ_in_costs_alone_are_one() {
        let mut choices = Choices::from(choice("tile", 1e-3, 3e-3));
        choices.add(choice("tile", 3e-3, 5e-3), 1);
        let expected = "forward by tile, 2.00 ms predicted from measured rates (other: slower, 4.00 \
                        ms predicted from measured rates)";
        assert_eq!(choices.to_string(), expected);
        assert_eq!(choices.iter().map(|(_, count)| count).collect::<Vec<_>>(), [2]);
        assert!(choices.is_like(&Choices::from(choice("tile", 1.0, 2.0))));
        choices.add(choice("cudnn", 1e-3, 3e-3), 1);
        assert_eq!(choices.iter().count(), 2);
        assert!(!choices.is_like(&Choices::from(choice("tile", 1.0, 2.0))));
    }
}
