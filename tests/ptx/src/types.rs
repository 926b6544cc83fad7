//! PTX types, and the parts of an instruction's name.

/// The way in which PTX reads the bits of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Bits,
    Unsigned,
    Signed,
    Float,
    Brain,
}

/// A scalar type, or a packed pair of floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Type {
    pub kind: Kind,
    /// The bits of one lane.
    pub bits: u32,
    pub lanes: u32,
}

impl Type {
    pub const fn new(kind: Kind, bits: u32, lanes: u32) -> Self {
        Self { kind, bits, lanes }
    }

    /// Returns the type of a name such as `f32`.
    pub fn parse(name: &str) -> Option<Self> {
        use Kind::*;
        Some(match name {
            "pred" => Self::new(Bits, 1, 1),
            "f32x2" => Self::new(Float, 32, 2),
            "f16x2" => Self::new(Float, 16, 2),
            "bf16x2" => Self::new(Brain, 16, 2),
            "bf16" => Self::new(Brain, 16, 1),
            "f16" | "f32" | "f64" => Self::new(Float, name[1..].parse().ok()?, 1),
            "b8" | "b16" | "b32" | "b64" => Self::new(Bits, name[1..].parse().ok()?, 1),
            "u8" | "u16" | "u32" | "u64" => Self::new(Unsigned, name[1..].parse().ok()?, 1),
            "s8" | "s16" | "s32" | "s64" => Self::new(Signed, name[1..].parse().ok()?, 1),
            _ => return None,
        })
    }

    /// Returns the name that [`Type::parse`] takes.
    pub fn name(self) -> String {
        let kind = match self.kind {
            Kind::Bits => "b",
            Kind::Unsigned => "u",
            Kind::Signed => "s",
            Kind::Float => "f",
            Kind::Brain => "bf",
        };
        format!("{kind}{}{}", self.bits, if self.lanes == 2 { "x2" } else { "" })
    }

    pub fn is_float(self) -> bool {
        matches!(self.kind, Kind::Float | Kind::Brain)
    }

    /// Returns the bits of all lanes.
    pub fn width(self) -> u32 {
        self.bits * self.lanes
    }

    pub fn bytes(self) -> usize {
        self.width().div_ceil(8) as usize
    }

    /// Returns the bits of a lane in the low bits of a word.
    pub fn mask(self) -> u64 {
        mask(self.bits)
    }

    /// Returns the integer that the bits mean.
    pub fn integer(self, bits: u64) -> i128 {
        let unused = 64 - self.bits;
        match self.kind {
            Kind::Signed => ((bits << unused) as i64 >> unused).into(),
            _ => (bits & self.mask()).into(),
        }
    }

    /// Returns the least and the largest integer.
    pub fn range(self) -> (i128, i128) {
        match self.kind {
            Kind::Signed => (-(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1),
            _ => (0, self.mask().into()),
        }
    }
}

/// Returns a word whose low bits are ones.
pub(crate) fn mask(bits: u32) -> u64 {
    u64::MAX >> (64 - bits)
}

/// The name of an instruction, and the modifiers that no decoder has taken yet.
#[derive(Debug, Clone)]
pub(crate) struct Mnemonic<'a> {
    pub name: &'a str,
    /// The number of operands that the instruction reads.
    pub operands: usize,
    modifiers: Vec<&'a str>,
}

impl<'a> Mnemonic<'a> {
    pub fn new(text: &'a str, operands: usize) -> Self {
        // The parts of a hint such as `L1::no_allocate` have no dots.
        let mut parts = text.split('.');
        Self { name: parts.next().unwrap_or_default(), operands, modifiers: parts.collect() }
    }

    /// Takes a modifier. Returns whether it is there.
    pub fn take(&mut self, modifier: &str) -> bool {
        let at = self.modifiers.iter().position(|m| *m == modifier);
        at.map(|at| self.modifiers.remove(at)).is_some()
    }

    /// Takes the first modifier that the table has. Returns its value.
    pub fn choose<T: Copy>(&mut self, table: &[(&str, T)]) -> Option<T> {
        let find = |m: &str| table.iter().find(|(name, _)| *name == m).map(|&(_, value)| value);
        let at = self.modifiers.iter().position(|m| find(m).is_some())?;
        find(self.modifiers.remove(at))
    }

    /// Takes a modifier that the table has. Its lack is an error.
    pub fn require<T: Copy>(&mut self, what: &str, table: &[(&str, T)]) -> Result<T, String> {
        let name = self.name;
        self.choose(table).ok_or_else(|| format!("'{name}' needs a {what} that is supported"))
    }

    /// Takes the last modifier that names a type.
    pub fn ty(&mut self) -> Result<Type, String> {
        let at = self.modifiers.iter().rposition(|m| Type::parse(m).is_some());
        let found = at.and_then(|at| Type::parse(self.modifiers.remove(at)));
        found.ok_or_else(|| format!("'{}' needs a type that is supported", self.name))
    }

    /// Takes all modifiers that the predicate holds for.
    pub fn ignore(&mut self, meaningless: impl Fn(&str) -> bool) {
        self.modifiers.retain(|m| !meaningless(m));
    }

    /// Returns an error that names the first modifier that no decoder took.
    pub fn finish(&self) -> Result<(), String> {
        match self.modifiers.first() {
            None => Ok(()),
            Some(left) => Err(format!("'.{left}' of '{}' is not supported", self.name)),
        }
    }
}
