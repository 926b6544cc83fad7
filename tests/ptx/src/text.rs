//! Splits PTX text into tokens.

use crate::error::Error;

/// A word, a number, a string or a punctuation mark.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Token<'a> {
    pub text: &'a str,
    /// The position of the token's first byte in the text.
    pub start: usize,
    /// The line, from 1.
    pub line: u32,
}

/// Directives that end with their line instead of a semicolon, and mean nothing to a run.
const LINES: [&str; 5] = [".version", ".target", ".address_size", ".file", ".loc"];

/// Returns all tokens without comments and without the directives of [`LINES`].
pub(crate) fn tokens(source: &str) -> Result<Vec<Token<'_>>, Error> {
    let mut found = Vec::new();
    let (mut at, mut line) = (0, 1);
    while let Some(first) = source[at..].chars().next() {
        let rest = &source[at..];
        let token = Token { text: &rest[..length(rest, first)], start: at, line };
        if token.text.is_empty() {
            return Err(error(&token, rest.lines().next().unwrap_or_default(), "has no end"));
        }
        let line_only = LINES.contains(&token.text);
        if token.text == ".address_size" && !rest.starts_with(".address_size 64") {
            return Err(error(&token, token.text, "only addresses of 64 bits are supported"));
        }
        let taken =
            if line_only { rest.find('\n').unwrap_or(rest.len()) } else { token.text.len() };
        let comment = token.text.starts_with("//") || token.text.starts_with("/*");
        if !(line_only || comment || first.is_whitespace()) {
            found.push(token);
        }
        line += rest[..taken].matches('\n').count() as u32;
        at += taken;
    }
    Ok(found)
}

/// Returns the number of bytes of the first token; 0 for a comment or string without an end.
fn length(rest: &str, first: char) -> usize {
    let word = |c: char| c.is_ascii_alphanumeric() || "_$%.".contains(c);
    if rest.starts_with("//") {
        return rest.find('\n').unwrap_or(rest.len());
    }
    if rest.starts_with("/*") {
        return rest.find("*/").map_or(0, |end| end + 2);
    }
    if first == '"' {
        return rest[1..].find('"').map_or(0, |end| end + 2);
    }
    if !word(first) {
        return first.len_utf8();
    }
    let mut end = rest.find(|c| !word(c)).unwrap_or(rest.len());
    // Cache hints such as `.L1::no_allocate` are part of their instruction's word.
    while rest[end..].starts_with("::") {
        let more = &rest[end + 2..];
        end += 2 + more.find(|c| !word(c)).unwrap_or(more.len());
    }
    end
}

fn error(token: &Token<'_>, text: &str, reason: &str) -> Error {
    Error::Parse { line: token.line, text: text.into(), reason: reason.into() }
}
