//! Reads tokens one after the other, and the declarations of variables.

use crate::error::Error;
use crate::text::Token;
use crate::types::{Type, mask};

pub(crate) struct Cursor<'a> {
    pub source: &'a str,
    pub tokens: Vec<Token<'a>>,
    pub at: usize,
}

/// A declared variable.
#[derive(Debug, Clone)]
pub(crate) struct Variable<'a> {
    pub name: &'a str,
    /// The size; 0 for an array whose size the launch chooses.
    pub bytes: usize,
    pub alignment: usize,
    /// The initial contents, if the declaration has them.
    pub initial: Option<Vec<u8>>,
}

impl<'a> Cursor<'a> {
    /// Returns the next token's text; nothing at the end is an empty text.
    pub fn peek(&self) -> &'a str {
        self.peek_at(0)
    }

    pub fn peek_at(&self, distance: usize) -> &'a str {
        self.tokens.get(self.at + distance).map_or("", |token| token.text)
    }

    pub fn next(&mut self) -> &'a str {
        let text = self.peek();
        self.at += 1;
        text
    }

    /// Takes a token. Returns whether it is the next one.
    pub fn take(&mut self, text: &str) -> bool {
        let found = self.peek() == text;
        self.at += usize::from(found);
        found
    }

    pub fn expect(&mut self, text: &str) -> Result<(), String> {
        if self.take(text) {
            return Ok(());
        }
        Err(format!("expected '{text}', got '{}'", self.peek()))
    }

    /// Returns the number of commas before the next token of this text.
    pub fn commas(&self, end: &str) -> usize {
        let rest = self.tokens[self.at..].iter().map(|token| token.text);
        rest.take_while(|text| *text != end).filter(|text| *text == ",").count()
    }

    /// Skips to the token after the next one of this text.
    pub fn skip_past(&mut self, text: &str) {
        while !self.peek().is_empty() && self.next() != text {}
    }

    /// Skips a block in braces.
    pub fn skip_block(&mut self) -> Result<(), String> {
        self.expect("{")?;
        let mut depth = 1;
        while depth > 0 {
            match self.next() {
                "{" => depth += 1,
                "}" => depth -= 1,
                "" => return Err("a block has no end".into()),
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the line and the text of the statement that starts at a token.
    pub fn statement(&self, start: usize) -> (u32, String) {
        let Some(first) = self.tokens.get(start.min(self.tokens.len().saturating_sub(1))) else {
            return (1, String::new());
        };
        let rest = &self.source[first.start..];
        let end = rest.find([';', '\n']).unwrap_or(rest.len());
        let words: Vec<_> = rest[..end].split_whitespace().collect();
        (first.line, words.join(" "))
    }

    pub fn error(&self, start: usize, reason: String) -> Error {
        let (line, text) = self.statement(start);
        Error::Parse { line, text, reason }
    }

    /// Takes an integer, with its sign.
    pub fn integer(&mut self) -> Result<i128, String> {
        let negative = self.take("-");
        let text = self.next();
        let digits = text.trim_end_matches('U');
        let found = match digits.get(..2) {
            Some("0x" | "0X") => i128::from_str_radix(&digits[2..], 16),
            Some("0b" | "0B") => i128::from_str_radix(&digits[2..], 2),
            _ => digits.parse(),
        };
        let size = found.map_err(|_| format!("expected an integer, got '{text}'"))?;
        Ok(if negative { -size } else { size })
    }

    fn size(&mut self) -> Result<usize, String> {
        let size = self.integer()?;
        usize::try_from(size).map_err(|_| format!("{size} is no size"))
    }

    /// Takes the dimensions of a directive such as `.reqntid 128, 1, 1`.
    pub fn dimensions(&mut self) -> Result<[u32; 3], String> {
        let mut found = [1; 3];
        for (axis, size) in found.iter_mut().enumerate() {
            if axis > 0 && !self.take(",") {
                break;
            }
            *size = self.size()? as u32;
        }
        Ok(found)
    }

    /// Takes the literal of a value of some width, if the next token starts one.
    pub fn literal(&mut self, bits: u32) -> Result<Option<u64>, String> {
        let text = self.peek();
        for (prefix, width) in [(["0f", "0F"], 32), (["0d", "0D"], 64)] {
            let Some(digits) = prefix.iter().find_map(|prefix| text.strip_prefix(prefix)) else {
                continue;
            };
            if width != bits {
                return Err(format!("'{text}' has {width} bits, not {bits}"));
            }
            self.at += 1;
            let found = u64::from_str_radix(digits, 16);
            return found.map(Some).map_err(|_| format!("'{text}' is no float"));
        }
        if text == "-" || text.starts_with(|c: char| c.is_ascii_digit()) {
            return Ok(Some(self.integer()? as u64 & mask(bits)));
        }
        Ok(None)
    }

    /// Takes the rest of a variable's declaration, after its kind of memory.
    pub fn variable(&mut self) -> Result<Variable<'a>, String> {
        let (mut alignment, mut element) = (None, None);
        while self.peek().starts_with('.') {
            let word = self.next();
            match word {
                // The alignment of a pointer's target is no property of the pointer.
                ".ptr" => {
                    while !self.peek().starts_with(|c: char| c == '_' || c.is_alphabetic()) {
                        self.at += 1;
                    }
                    break;
                }
                ".align" => alignment = Some(self.size()?),
                _ => {
                    let found = Type::parse(&word[1..]);
                    element = Some(found.ok_or_else(|| format!("'{word}' is not supported"))?);
                }
            }
        }
        let element = element.ok_or("a variable needs a type")?;
        let (name, mut count) = (self.next(), 1);
        while self.take("[") {
            count *= if self.peek() == "]" { 0 } else { self.size()? };
            self.expect("]")?;
        }
        let bytes = count * element.bytes();
        let initial = if self.take("=") { Some(self.contents(element, bytes)?) } else { None };
        let alignment = alignment.unwrap_or(element.bytes());
        Ok(Variable { name, bytes, alignment, initial })
    }

    /// Takes initial values: one, or a list in braces. Values that are left out are zeros.
    fn contents(&mut self, element: Type, bytes: usize) -> Result<Vec<u8>, String> {
        let mut found = Vec::with_capacity(bytes);
        let list = self.take("{");
        while !(list && self.take("}")) {
            let value = self.literal(element.bits)?;
            let value = value.ok_or_else(|| format!("'{}' is no initial value", self.peek()))?;
            found.extend(&value.to_le_bytes()[..element.bytes()]);
            if !list {
                break;
            }
            self.take(",");
        }
        if found.len() > bytes {
            return Err(format!("{} initial bytes of {bytes}", found.len()));
        }
        found.resize(bytes, 0);
        Ok(found)
    }
}
