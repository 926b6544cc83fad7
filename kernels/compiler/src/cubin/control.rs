//! The waits that the assembler encodes in an instruction.

/// Control bits of a machine instruction: bits 105 to 125 of its 128.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Control {
    /// Cycles until the warp's next instruction may issue.
    pub stall: u8,
    /// The scoreboard, 0 to 5, that the instruction holds until its result is written.
    pub write: Option<u8>,
    /// The scoreboard, 0 to 5, that the instruction holds until its operands are read.
    pub read: Option<u8>,
    /// The scoreboards that must be free before the instruction issues: bit n is scoreboard n.
    pub wait: u8,
}

impl Control {
    /// Returns the control bits of the upper half of an encoding.
    pub(super) fn of(high: u64) -> Self {
        let bits = high >> 41;
        let field = |shift: u32, mask: u64| (bits >> shift & mask) as u8;
        let scoreboard = |number: u8| (number < 6).then_some(number);
        Self {
            stall: field(0, 0xf),
            write: scoreboard(field(5, 7)),
            read: scoreboard(field(8, 7)),
            wait: field(11, 0x3f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_where_the_assembler_puts_them() {
        // Stall 5 without scoreboards; then stall 1, write 2, read 0, wait for 1 and 3.
        let none = Control { stall: 5, write: None, read: None, wait: 0 };
        assert_eq!(Control::of((5 | 7 << 5 | 7 << 8) << 41), none);
        let all = Control { stall: 1, write: Some(2), read: Some(0), wait: 0b1010 };
        assert_eq!(Control::of((1 | 2 << 5 | 0b1010 << 11) << 41 | 0x1ff), all);
    }
}
