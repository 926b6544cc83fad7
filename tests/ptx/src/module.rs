//! Reads a module: its variables, functions and kernels.

use std::collections::HashMap;

use crate::body::Builder;
use crate::cursor::{Cursor, Variable};
use crate::error::Error;
use crate::text::tokens;
use crate::{Global, Kernel, Module, Parameter};

/// What bodies refer to by name.
#[derive(Default)]
pub(crate) struct Items<'a> {
    /// Indices of global and constant variables.
    pub globals: HashMap<&'a str, u32>,
    pub shared: HashMap<&'a str, Variable<'a>>,
    pub functions: HashMap<&'a str, Function<'a>>,
}

/// A function, or a kernel before its body is built.
pub(crate) struct Function<'a> {
    /// The names of its results and parameters.
    pub names: Vec<&'a str>,
    /// The first token of the body.
    pub body: usize,
}

/// A kernel before its body is built.
struct Entry<'a> {
    name: &'a str,
    parameters: Vec<Variable<'a>>,
    limits: Limits,
    body: usize,
}

#[derive(Debug, Default)]
pub(crate) struct Limits {
    /// The only shape of a block that the kernel runs with.
    pub shape: Option<[u32; 3]>,
    /// The largest number of threads of a block.
    pub threads: Option<u32>,
}

#[derive(Default)]
struct Reader<'a> {
    items: Items<'a>,
    globals: Vec<Global>,
    entries: Vec<Entry<'a>>,
}

pub(crate) fn parse(text: &str) -> Result<Module, Error> {
    let mut cursor = Cursor { source: text, tokens: tokens(text)?, at: 0 };
    let mut reader = Reader::default();
    while !cursor.peek().is_empty() {
        let start = cursor.at;
        reader.item(&mut cursor).map_err(|reason| cursor.error(start, reason))?;
    }
    let mut kernels = Vec::with_capacity(reader.entries.len());
    for entry in reader.entries {
        let parameters = place(&entry.parameters);
        let addresses = parameters.iter().map(|parameter| parameter.offset as u64);
        let named: Vec<_> =
            entry.parameters.iter().map(|variable| variable.name).zip(addresses).collect();
        let body = Builder::new(&mut cursor, &reader.items).build(entry.body, &named)?;
        let name = entry.name.into();
        kernels.push(Kernel { name, parameters, limits: entry.limits, body });
    }
    Ok(Module { kernels, globals: reader.globals })
}

/// Returns the parameters, each at a multiple of its alignment.
fn place(variables: &[Variable<'_>]) -> Vec<Parameter> {
    let mut end = 0usize;
    let one = |variable: &Variable<'_>| {
        let offset = end.next_multiple_of(variable.alignment);
        end = offset + variable.bytes;
        Parameter { bytes: variable.bytes, alignment: variable.alignment, offset }
    };
    variables.iter().map(one).collect()
}

impl<'a> Reader<'a> {
    /// Takes one item of the module.
    fn item(&mut self, cursor: &mut Cursor<'a>) -> Result<(), String> {
        while matches!(cursor.peek(), ".visible" | ".extern" | ".weak" | ".common") {
            cursor.at += 1;
        }
        match cursor.next() {
            ".entry" => {
                let name = cursor.next();
                let parameters = parameter_list(cursor)?;
                let limits = limits(cursor)?;
                self.entries.push(Entry { name, parameters, limits, body: cursor.at });
                cursor.skip_block()?;
            }
            ".func" => self.function(cursor)?,
            ".global" | ".const" => {
                let variable = cursor.variable()?;
                self.items.globals.insert(variable.name, self.globals.len() as u32);
                self.globals.push(Global {
                    name: variable.name.into(),
                    bytes: variable.bytes,
                    alignment: variable.alignment,
                    initial: variable.initial,
                });
                cursor.expect(";")?;
            }
            ".shared" => {
                let variable = cursor.variable()?;
                self.items.shared.insert(variable.name, variable);
                cursor.expect(";")?;
            }
            ".section" => {
                cursor.at += 1;
                cursor.skip_block()?;
            }
            ".pragma" => cursor.skip_past(";"),
            other => return Err(format!("'{other}' is not supported in a module")),
        }
        Ok(())
    }

    fn function(&mut self, cursor: &mut Cursor<'a>) -> Result<(), String> {
        let mut variables = parameter_list(cursor)?;
        let name = cursor.next();
        variables.extend(parameter_list(cursor)?);
        cursor.take(".noreturn");
        // A declaration without a body ends here.
        if cursor.take(";") {
            return Ok(());
        }
        let names = variables.iter().map(|variable| variable.name).collect();
        self.items.functions.insert(name, Function { names, body: cursor.at });
        cursor.skip_block()
    }
}

/// Takes parameters in parentheses, if there are any.
fn parameter_list<'a>(cursor: &mut Cursor<'a>) -> Result<Vec<Variable<'a>>, String> {
    let mut found = vec![];
    if cursor.take("(") {
        while !cursor.take(")") {
            cursor.expect(".param")?;
            found.push(cursor.variable()?);
            cursor.take(",");
        }
    }
    Ok(found)
}

/// Takes the directives between a kernel's parameters and its body.
fn limits(cursor: &mut Cursor<'_>) -> Result<Limits, String> {
    let mut found = Limits::default();
    while cursor.peek() != "{" {
        match cursor.next() {
            ".reqntid" => found.shape = Some(cursor.dimensions()?),
            ".maxntid" => found.threads = Some(cursor.dimensions()?.iter().product()),
            ".minnctapersm" | ".maxnctapersm" | ".maxnreg" => {
                cursor.integer()?;
            }
            ".pragma" => cursor.skip_past(";"),
            other => return Err(format!("'{other}' is not supported for a kernel")),
        }
    }
    Ok(found)
}
