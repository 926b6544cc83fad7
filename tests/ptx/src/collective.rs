//! Instructions that the lanes of a warp carry out together.

use crate::body::Builder;
use crate::compute::{Width, function};
use crate::program::{Op, Source};
use crate::types::Mnemonic;

/// The lanes of a warp.
pub(crate) const LANES: usize = 32;

/// Returns a lane's result and predicate. The values are those of all lanes that take part; a
/// result is lacking if it comes from a lane that does not.
type Function = Box<dyn Fn(&[Option<[u64; 3]>; LANES], usize) -> (Option<u64>, bool) + Send + Sync>;

pub(crate) struct Collective {
    /// Registers of the result and of the predicate.
    pub to: [Option<u32>; 2],
    pub from: [Source; 3],
    /// The lanes that take part, as bits.
    pub mask: Source,
    pub function: Function,
    /// Whether the result is the first value of a lane, with the bits that this value lacks.
    pub moves: bool,
}

const WORD: Width = Width::Exactly(32);

impl Builder<'_, '_> {
    /// Decodes an instruction of the lanes of a warp.
    pub fn collective(&mut self, mnemonic: &mut Mnemonic<'_>) -> Result<(), String> {
        mnemonic.take("sync");
        let name = mnemonic.name;
        let unused = Source::Value(0);
        if name == "bar" {
            let mask = self.source(WORD)?;
            let function: Function = Box::new(|_, _| (None, false));
            let (to, from) = ([None; 2], [unused; 3]);
            return self.push_collective(Collective { to, from, mask, function, moves: false });
        }
        let (function, operands): (Function, usize) = match name {
            "shfl" => (shuffle(mnemonic)?, 3),
            "vote" => return self.vote(mnemonic),
            _ => (reduce(mnemonic)?, 1),
        };
        let ty = mnemonic.ty()?;
        let mut to = [self.destination(ty.bits)?, None];
        if self.cursor.take("|") {
            to[1] = self.destination(1)?;
        }
        let mut from = [unused; 3];
        for (place, source) in from[..operands].iter_mut().enumerate() {
            *source = self.next_source(if place == 0 { Width::Exactly(ty.bits) } else { WORD })?;
        }
        let mask = self.next_source(WORD)?;
        let moves = name == "shfl";
        self.push_collective(Collective { to, from, mask, function, moves })
    }

    fn push_collective(&mut self, collective: Collective) -> Result<(), String> {
        self.push(Op::Collective(Box::new(collective)));
        Ok(())
    }

    fn vote(&mut self, mnemonic: &mut Mnemonic<'_>) -> Result<(), String> {
        let all: fn(u64, u64) -> u64 = |voted, present| u64::from(voted == present);
        type Mode = fn(u64, u64) -> u64;
        let modes: [(&str, Mode); 4] = [
            ("all", all),
            ("any", |voted, _| u64::from(voted != 0)),
            ("uni", |voted, present| u64::from(voted == 0 || voted == present)),
            ("ballot", |voted, _| voted),
        ];
        let mode = mnemonic.require("mode", &modes)?;
        let to = self.destination(mnemonic.ty()?.bits)?;
        self.cursor.expect(",")?;
        let (predicate, negated) = self.predicate()?;
        let mask = self.next_source(WORD)?;
        let function: Function = Box::new(move |values, _| {
            let lanes = |wanted: fn(u64, bool) -> bool| {
                let holds = |value: &[u64; 3]| wanted(value[0], negated);
                bits(values.iter().map(|value| value.as_ref().is_some_and(holds)))
            };
            let voted = lanes(|value, negated| (value == 1) != negated);
            (Some(mode(voted, lanes(|_, _| true))), false)
        });
        let (to, from) = ([to, None], [predicate, Source::Value(0), Source::Value(0)]);
        self.push_collective(Collective { to, from, mask, function, moves: false })
    }
}

/// Returns a word whose bits are the flags of the lanes.
fn bits(flags: impl Iterator<Item = bool>) -> u64 {
    flags.enumerate().map(|(lane, flag)| u64::from(flag) << lane).sum()
}

fn shuffle(mnemonic: &mut Mnemonic<'_>) -> Result<Function, String> {
    // A mode returns the source lane, and whether it is within the segment.
    type Mode = fn(lane: i64, shift: i64, clamp: i64, segment: i64) -> (i64, bool);
    let modes: [(&str, Mode); 4] = [
        ("up", |lane, shift, clamp, segment| {
            (lane - shift, lane - shift >= bound(lane, clamp, segment))
        }),
        ("down", |lane, shift, clamp, segment| {
            (lane + shift, lane + shift <= bound(lane, clamp, segment))
        }),
        ("bfly", |lane, shift, clamp, segment| {
            (lane ^ shift, lane ^ shift <= bound(lane, clamp, segment))
        }),
        ("idx", |lane, shift, clamp, segment| {
            let from = (lane & segment) | (shift & !segment);
            (from, from <= bound(lane, clamp, segment))
        }),
    ];
    let mode = mnemonic.require("mode", &modes)?;
    Ok(Box::new(move |values, lane| {
        let [_, shift, control] = values[lane].unwrap_or_default();
        let (clamp, segment) = ((control & 31) as i64, (control >> 8 & 31) as i64);
        let (from, inside) = mode(lane as i64, (shift & 31) as i64, clamp, segment);
        let from = if inside { from as usize } else { lane };
        (values[from].map(|value| value[0]), inside)
    }))
}

/// Returns the bound of a lane's segment.
fn bound(lane: i64, clamp: i64, segment: i64) -> i64 {
    (lane & segment) | (clamp & !segment)
}

/// A reduction combines the lanes like the instruction of the operation's name.
fn reduce(mnemonic: &mut Mnemonic<'_>) -> Result<Function, String> {
    let names = ["add", "min", "max", "and", "or", "xor"].map(|name| (name, name));
    let operation = mnemonic.require("operation", &names)?;
    let nan = if mnemonic.take("NaN") { "NaN." } else { "" };
    let name = format!("{operation}.{nan}{}", mnemonic.clone().ty()?.name());
    let combine = function(&name)?;
    Ok(Box::new(move |values, _| {
        let mut lanes = values.iter().flatten().map(|value| Some(value[0]));
        let first = lanes.next().flatten();
        (lanes.fold(first, |all, lane| combine(&[all?, lane?, 0, 0])), false)
    }))
}
