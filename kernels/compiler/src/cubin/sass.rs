//! The text that `nvdisasm -c` prints: instructions, labels and branches of a kernel. With `-hex`
//! the encoding of each instruction follows it.

use std::collections::HashMap;

use super::{Control, Error};

/// A machine instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instruction {
    /// Bytes from the start of its section.
    pub address: u64,
    /// The predicate that it runs under, such as `P0` or `!UP1`; `None` where it always runs.
    pub guard: Option<String>,
    /// Opcode with its modifiers, such as `MUFU.EX2`.
    pub opcode: String,
    /// The text behind the opcode.
    pub operands: String,
    /// Positions in the listing that it can branch to. Empty where it names no label.
    pub targets: Vec<usize>,
    /// Its waits; `None` where the text has no encodings.
    pub control: Option<Control>,
}

impl Instruction {
    /// Returns the opcode without modifiers: `MUFU` of `MUFU.EX2`.
    pub fn base(&self) -> &str {
        self.opcode.split('.').next().unwrap_or_default()
    }

    /// Returns the operands one by one.
    pub fn operand_list(&self) -> impl Iterator<Item = &str> {
        self.operands.split(',').map(str::trim).filter(|operand| !operand.is_empty())
    }

    /// Whether the instruction runs whenever it is reached.
    pub fn always(&self) -> bool {
        self.guard.is_none()
    }
}

/// The instructions of one code section, in the order of their addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    /// The instructions.
    pub instructions: Vec<Instruction>,
    /// The names of functions, and the positions where they start.
    pub functions: Vec<(String, usize)>,
}

impl Listing {
    /// Returns the listing in the disassembly of an image with one code section.
    ///
    /// # Errors
    ///
    /// If a line has an unknown form, a branch goes to an unknown label, or there is no
    /// instruction.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut instructions: Vec<Instruction> = Vec::new();
        let mut labels = HashMap::new();
        let mut declared = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let unknown = || Error::Line { line: number, text: line.into() };
            match Line::of(line).ok_or_else(unknown)? {
                Line::Nothing => {}
                Line::Function(name) => declared.push(name),
                Line::Label(label) => {
                    if labels.insert(label, instructions.len()).is_some() {
                        return Err(unknown());
                    }
                }
                Line::Encoding(high) => {
                    let last = instructions.last_mut().filter(|last| last.control.is_none());
                    last.ok_or_else(unknown)?.control = Some(Control::of(high));
                }
                Line::Instruction(instruction) => {
                    if instructions.last().is_some_and(|last| last.address >= instruction.address) {
                        return Err(Error::Address(instruction.address));
                    }
                    instructions.push(instruction);
                }
            }
        }
        if instructions.is_empty() {
            return Err(Error::NoInstruction);
        }
        let count = instructions.len();
        for instruction in &mut instructions {
            instruction.targets = targets(instruction, &labels, count)?;
        }
        let place = |name: &str| labels.get(name).map(|&at| (name.to_owned(), at));
        let functions = declared.into_iter().filter_map(place).collect();
        Ok(Self { instructions, functions })
    }
}

enum Line<'a> {
    Nothing,
    Function(&'a str),
    Label(&'a str),
    /// The upper half of the encoding of the instruction before.
    Encoding(u64),
    Instruction(Instruction),
}

impl<'a> Line<'a> {
    fn of(line: &'a str) -> Option<Self> {
        let text = line.trim();
        if text.is_empty() || text.starts_with("//") {
            return Some(Self::Nothing);
        }
        if let Some(high) = encoding(text) {
            return high.map(Self::Encoding);
        }
        if let Some(rest) = text.strip_prefix("/*") {
            let (address, rest) = rest.split_once("*/")?;
            let address = u64::from_str_radix(address, 16).ok()?;
            return instruction(address, rest.trim()).map(Self::Instruction);
        }
        if let Some(label) = text.strip_suffix(':') {
            let name = !label.is_empty() && !label.contains(char::is_whitespace);
            return name.then_some(Self::Label(label));
        }
        if let Some(declaration) = text.strip_prefix(".type") {
            let (name, kind) = declaration.split_once(',')?;
            let function = kind.trim() == "@function";
            return Some(if function { Self::Function(name.trim()) } else { Self::Nothing });
        }
        text.starts_with('.').then_some(Self::Nothing)
    }
}

/// Returns the number in a text that is one remark, such as `/* 0x000fe20000000800 */`.
fn encoding(text: &str) -> Option<Option<u64>> {
    let digits = text.strip_prefix("/* 0x")?;
    let digits = digits.strip_suffix("*/").map(str::trim_end);
    Some(digits.and_then(|digits| u64::from_str_radix(digits, 16).ok()))
}

fn instruction(address: u64, text: &str) -> Option<Instruction> {
    // The lower half of the encoding may stand behind the semicolon. It adds nothing to the text.
    let (text, remark) = text.rsplit_once(';')?;
    if !remark.trim().is_empty() {
        encoding(remark.trim())??;
    }
    let text = text.trim();
    let (guard, text) = match text.strip_prefix('@') {
        Some(guarded) => guarded.split_once(' ').map(|(guard, rest)| (Some(guard), rest.trim()))?,
        None => (None, text),
    };
    let (opcode, operands) = text.split_once(' ').unwrap_or((text, ""));
    let known = |c: char| c.is_ascii_alphanumeric() || c == '.' || c == '_';
    let named = opcode.starts_with(|c: char| c.is_ascii_uppercase()) && opcode.chars().all(known);
    named.then(|| Instruction {
        address,
        // A guard that always holds is no guard.
        guard: guard.filter(|&guard| guard != "PT" && guard != "UPT").map(str::to_owned),
        opcode: opcode.into(),
        operands: operands.trim().into(),
        targets: Vec::new(),
        control: None,
    })
}

/// Returns the positions that an instruction can branch to. Labels stand as `` `(.L_x_1)`` among
/// the operands; the labels of a jump table stand in a remark behind them.
fn targets(
    instruction: &Instruction,
    labels: &HashMap<&str, usize>,
    count: usize,
) -> Result<Vec<usize>, Error> {
    let operands = &instruction.operands;
    // A return names the function that it is in, not its target.
    if instruction.base() == "RET" {
        return Ok(Vec::new());
    }
    let direct = operands.split("`(").skip(1).map(|rest| rest.split(')').next());
    let table = operands.split_once("BRANCH_TARGETS ").map(|(_, rest)| rest);
    let table = table.and_then(|rest| rest.split('"').next());
    let table = table.into_iter().flat_map(|list| list.split(',')).map(Some);
    let find = |label: Option<&str>| {
        let label = label.unwrap_or_default().trim();
        let at = labels.get(label).copied().filter(|&at| at < count);
        let address = instruction.address;
        at.ok_or_else(|| Error::Label { address, label: label.into() })
    };
    direct.chain(table).map(find).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "\t.target\tsm_90a

\t.elftype\t@\"ET_EXEC\"

//--------------------- .text.kernel       --------------------------
\t.section\t.text.kernel,\"ax\",@progbits
        .type           kernel,@function
        .size           kernel,(.L_x_1 - kernel)
kernel:
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   MUFU.EX2 R3, R2 ;
        /*0020*/              @!P0 BRA `(.L_x_0) ;
        /*0030*/               @PT BRX R4 -0x40     (*\"BRANCH_TARGETS .L_x_0,.L_x_2\"*);
.L_x_2:
        /*0040*/                   EXIT ;
.L_x_1:
";

    #[test]
    fn reads_addresses_guards_opcodes_operands_and_targets() {
        let listing = Listing::parse(SMALL).unwrap();
        assert_eq!(listing.functions, [("kernel".to_owned(), 0)]);
        let [load, power, branch, table, exit] = &listing.instructions[..] else {
            panic!("expected 5 instructions, came {:?}", listing.instructions)
        };
        assert_eq!((load.opcode.as_str(), load.operands.as_str()), ("LDC", "R1, c[0x0][0x28]"));
        assert_eq!((power.base(), power.address), ("MUFU", 0x10));
        assert_eq!(power.operand_list().collect::<Vec<_>>(), ["R3", "R2"]);
        assert_eq!((branch.guard.as_deref(), &branch.targets[..]), (Some("!P0"), &[1][..]));
        assert_eq!((table.guard.as_deref(), &table.targets[..]), (None, &[1, 4][..]));
        assert_eq!((exit.operands.as_str(), exit.always()), ("", true));
    }

    #[test]
    fn encodings_say_what_an_instruction_waits_for() {
        let low = "EXIT ;                 /* 0x000000000000794d */\n";
        let high = "                       /* 0x000fea0003800000 */\n";
        let text = SMALL.replace("EXIT ;\n", &format!("{low}{high}"));
        let listing = Listing::parse(&text).unwrap();
        let [.., table, exit] = &listing.instructions[..] else { panic!("{listing:?}") };
        let control = exit.control.expect("an encoding");
        assert_eq!((control.stall, control.write, control.wait), (5, None, 0));
        assert_eq!(table.control, None);
        let wrong = [text.replace("0x000fea", "0xgfea"), text.replace(high, &high.repeat(2))];
        for text in wrong {
            assert!(matches!(Listing::parse(&text), Err(Error::Line { .. })), "{text}");
        }
    }

    #[test]
    fn a_return_names_its_function_but_does_not_go_there() {
        let code = SMALL.replace("EXIT ;", "RET.REL.NODEC R2 `(kernel) ;");
        let last = Listing::parse(&code).unwrap().instructions.pop().unwrap();
        assert_eq!((last.base(), &last.targets[..]), ("RET", &[][..]));
    }

    #[test]
    fn refuses_text_that_is_not_a_listing() {
        assert_eq!(Listing::parse(""), Err(Error::NoInstruction));
        assert_eq!(Listing::parse("\t.target\tsm_90a\n.L_x_0:\n"), Err(Error::NoInstruction));
        let lines = [
            "error : File 'x.cubin' is not in CUDA ELF format",
            "        /*0050*/                   EXIT",
            "        /*zz*/                   EXIT ;",
            "        /*0050*/                   exit ;",
            "        /*0050*/               @P0;",
            "        /*0050*/                   MOV! R1, R2 ;",
        ];
        for line in lines {
            let came = Listing::parse(&format!("{SMALL}{line}\n"));
            assert!(matches!(came, Err(Error::Line { line: 19, .. })), "{line}: {came:?}");
        }
    }

    #[test]
    fn refuses_branches_to_nowhere_and_labels_twice() {
        let nowhere = SMALL.replace("BRA `(.L_x_0)", "BRA `(.L_x_9)");
        let expected = Error::Label { address: 0x20, label: ".L_x_9".into() };
        assert_eq!(Listing::parse(&nowhere), Err(expected));
        // The listing has the label of the end, but no instruction behind it.
        let end = SMALL.replace("BRA `(.L_x_0)", "BRA `(.L_x_1)");
        assert!(matches!(Listing::parse(&end), Err(Error::Label { .. })));
        let table = SMALL.replace(",.L_x_2\"", ",.L_x_8\"");
        assert!(matches!(Listing::parse(&table), Err(Error::Label { address: 0x30, .. })));
        let twice = SMALL.replace(".L_x_2:", ".L_x_0:");
        assert!(matches!(Listing::parse(&twice), Err(Error::Line { line: 16, .. })));
    }

    #[test]
    fn refuses_a_second_code_section() {
        assert_eq!(
            Listing::parse(&format!("{SMALL}        /*0000*/                   EXIT ;\n")),
            Err(Error::Address(0))
        );
    }
}
