//! Builds the code of a kernel: scopes, declarations, labels, and calls.

use std::collections::HashMap;

use crate::cursor::{Cursor, Variable};
use crate::error::Error;
use crate::memory::Space;
use crate::module::Items;
use crate::operands::Symbol;
use crate::program::{Body, Instruction, Op, Register, Source};
use crate::types::{Mnemonic, Type, mask};

/// Calls within calls; more are taken for a recursion, which is not supported.
const DEPTH: usize = 16;

pub(crate) struct Builder<'a, 'm> {
    pub cursor: &'m mut Cursor<'a>,
    items: &'m Items<'a>,
    pub body: Body,
    scopes: Vec<HashMap<String, Symbol>>,
    labels: HashMap<(usize, &'a str), usize>,
    /// Branches whose label may come later: instruction, label, and first token.
    branches: Vec<(usize, (usize, &'a str), usize)>,
    /// The number of the call whose code is being built, and of its caller, and so on.
    calls: Vec<usize>,
    call_count: usize,
    guard: Option<(u32, bool)>,
    /// The first token of the statement.
    start: usize,
}

/// The label at the end of a call's code. No label of PTX has this name.
const END: &str = "end of call";

impl<'a, 'm> Builder<'a, 'm> {
    pub fn new(cursor: &'m mut Cursor<'a>, items: &'m Items<'a>) -> Self {
        Self {
            cursor,
            items,
            body: Body::default(),
            scopes: vec![HashMap::new()],
            labels: HashMap::new(),
            branches: vec![],
            calls: vec![0],
            call_count: 0,
            guard: None,
            start: 0,
        }
    }

    /// Builds the body that starts at a token. The parameters are at these addresses.
    pub fn build(mut self, start: usize, parameters: &[(&str, u64)]) -> Result<Body, Error> {
        self.cursor.at = start;
        for &(name, address) in parameters {
            self.declare(name, Symbol::Variable(Space::Parameter, Source::Value(address)));
        }
        self.located(|builder| builder.cursor.expect("{"))?;
        self.block()?;
        self.push(Op::Return);
        for (at, label, token) in std::mem::take(&mut self.branches) {
            let Some(&target) = self.labels.get(&label) else {
                return Err(self.cursor.error(token, format!("label '{}' is not there", label.1)));
            };
            self.body.code[at].op = Op::Branch(target);
        }
        Ok(self.body)
    }

    /// Runs a reader, and adds the statement to its error.
    fn located<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, String>,
    ) -> Result<T, Error> {
        self.start = self.cursor.at;
        read(self).map_err(|reason| self.cursor.error(self.start, reason))
    }

    /// Reads statements up to the end of a block.
    fn block(&mut self) -> Result<(), Error> {
        self.scopes.push(HashMap::new());
        loop {
            match (self.cursor.peek(), self.cursor.peek_at(1)) {
                ("}", _) => break,
                ("{", _) => {
                    self.cursor.at += 1;
                    self.block()?;
                }
                (label, ":") => {
                    let key = (self.call(), label);
                    self.located(|builder| match builder.labels.insert(key, builder.end()) {
                        None => Ok(()),
                        Some(_) => Err(format!("label '{label}' comes twice")),
                    })?;
                    self.cursor.at += 2;
                }
                ("call", _) => self.inline()?,
                (word, _) if word.starts_with("call.") => self.inline()?,
                _ => self.located(Self::statement)?,
            }
        }
        self.cursor.at += 1;
        self.scopes.pop();
        Ok(())
    }

    fn statement(&mut self) -> Result<(), String> {
        match self.cursor.peek() {
            "" => return Err("the body has no end".into()),
            ".reg" => self.registers()?,
            ".pragma" => self.cursor.skip_past(";"),
            ".shared" | ".local" | ".param" => self.memory()?,
            word if word.starts_with('.') => return Err(format!("'{word}' is not supported")),
            _ => {
                self.guard = self.take_guard()?;
                let operands = self.cursor.commas(";");
                let mut mnemonic = Mnemonic::new(self.cursor.next(), operands);
                self.decode(&mut mnemonic)?;
                mnemonic.finish()?;
                self.cursor.expect(";")?;
            }
        }
        Ok(())
    }

    fn take_guard(&mut self) -> Result<Option<(u32, bool)>, String> {
        if !self.cursor.take("@") {
            return Ok(None);
        }
        match self.predicate()? {
            (Source::Register(index), negated) => Ok(Some((index, !negated))),
            _ => Err("a guard must be a register".into()),
        }
    }

    /// Takes `.reg .b32 %r<8>, other;`.
    fn registers(&mut self) -> Result<(), String> {
        self.cursor.at += 1;
        let word = self.cursor.next();
        let ty = word.strip_prefix('.').and_then(Type::parse);
        let bits = ty.ok_or_else(|| format!("'{word}' is not supported"))?.width();
        loop {
            let name = self.cursor.next();
            if self.cursor.take("<") {
                let count = self.cursor.integer()?;
                self.cursor.expect(">")?;
                for number in 0..count {
                    self.register(&format!("{name}{number}"), bits);
                }
            } else {
                self.register(name, bits);
            }
            if !self.cursor.take(",") {
                return self.cursor.expect(";");
            }
        }
    }

    fn register(&mut self, name: &str, bits: u32) {
        let index = self.body.registers.len() as u32;
        self.body.registers.push(name.into());
        self.body.blank.push(Register { value: 0, lacking: mask(bits) });
        self.declare(name, Symbol::Register { index, bits });
    }

    /// Takes a variable of shared or local memory. A parameter of a call is local memory.
    fn memory(&mut self) -> Result<(), String> {
        let shared = self.cursor.next() == ".shared";
        let variable = self.cursor.variable()?;
        if variable.initial.is_some() || variable.bytes == 0 {
            return Err("a variable of a kernel needs a size, and no initial contents".into());
        }
        let address = self.place(shared, &variable);
        let space = if shared { Space::Shared } else { Space::Local };
        self.declare(variable.name, Symbol::Variable(space, Source::Value(address)));
        self.cursor.expect(";")
    }

    fn place(&mut self, shared: bool, variable: &Variable<'_>) -> u64 {
        let end = if shared { &mut self.body.shared } else { &mut self.body.local };
        let address = end.next_multiple_of(variable.alignment);
        *end = address + variable.bytes;
        address as u64
    }

    fn declare(&mut self, name: &str, symbol: Symbol) {
        self.scopes.last_mut().expect("a body has a scope").insert(name.into(), symbol);
    }

    /// Returns what a name means. A shared variable of the module gets its place here.
    pub fn lookup(&mut self, name: &str) -> Option<Symbol> {
        if let Some(found) = self.scopes.iter().rev().find_map(|scope| scope.get(name)) {
            return Some(*found);
        }
        if let Some(&index) = self.items.globals.get(name) {
            return Some(Symbol::Variable(Space::Global, Source::Global(index)));
        }
        let variable = self.items.shared.get(name)?;
        let address = match variable.bytes {
            0 => Source::DynamicShared,
            _ => Source::Value(self.place(true, variable)),
        };
        let symbol = Symbol::Variable(Space::Shared, address);
        self.scopes[0].insert(variable.name.into(), symbol);
        Some(symbol)
    }

    fn end(&self) -> usize {
        self.body.code.len()
    }

    fn call(&self) -> usize {
        *self.calls.last().expect("a body has a call")
    }

    /// Adds an instruction of the current statement.
    pub fn push(&mut self, op: Op) {
        let place = self.cursor.statement(self.start);
        if self.body.places.last() != Some(&place) {
            self.body.places.push(place);
        }
        let place = self.body.places.len() as u32 - 1;
        self.body.code.push(Instruction { guard: self.guard, op, place });
    }

    pub fn branch(&mut self) {
        let label = self.cursor.next();
        self.branches.push((self.end(), (self.call(), label), self.start));
        self.push(Op::Trap);
    }

    /// Ends the thread, or the function that the current code is a copy of.
    pub fn ret(&mut self) {
        if self.calls.len() == 1 {
            return self.push(Op::Return);
        }
        self.branches.push((self.end(), (self.call(), END), self.start));
        self.push(Op::Trap);
    }

    /// Puts a copy of the called function's code where the call is.
    fn inline(&mut self) -> Result<(), Error> {
        let (symbols, body) = self.located(Self::take_call)?;
        let after = self.cursor.at;
        self.call_count += 1;
        self.calls.push(self.call_count);
        // The function sees none of its caller's names except the module's variables.
        let callers = self.scopes.split_off(1);
        self.scopes.push(symbols);
        self.cursor.at = body + 1;
        self.block()?;
        self.scopes.truncate(1);
        self.scopes.extend(callers);
        self.labels.insert((self.call(), END), self.end());
        self.calls.pop();
        self.cursor.at = after;
        Ok(())
    }

    /// Takes `call (result), name, (arguments);`. Returns what the function's names of its results
    /// and parameters mean, and where its body starts.
    fn take_call(&mut self) -> Result<(HashMap<String, Symbol>, usize), String> {
        self.cursor.at += 1;
        let mut actual = self.call_list()?;
        if !actual.is_empty() {
            self.cursor.expect(",")?;
        }
        let name = self.cursor.next();
        let items = self.items;
        let function = items.functions.get(name);
        let function = function.ok_or_else(|| format!("function '{name}' has no body"))?;
        if self.calls.len() > DEPTH {
            return Err("recursion is not supported".into());
        }
        if self.cursor.take(",") {
            actual.extend(self.call_list()?);
        }
        self.cursor.expect(";")?;
        if actual.len() != function.names.len() {
            let (expected, got) = (function.names.len(), actual.len());
            return Err(format!("'{name}' has {expected} results and parameters, not {got}"));
        }
        let symbols = function.names.iter().map(|name| name.to_string()).zip(actual).collect();
        Ok((symbols, function.body))
    }

    fn call_list(&mut self) -> Result<Vec<Symbol>, String> {
        let mut found = vec![];
        if self.cursor.take("(") {
            while !self.cursor.take(")") {
                let name = self.cursor.next();
                let symbol = self.lookup(name);
                found.push(symbol.ok_or_else(|| format!("'{name}' is not declared"))?);
                self.cursor.take(",");
            }
        }
        Ok(found)
    }
}
