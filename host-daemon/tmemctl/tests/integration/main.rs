// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of tmemctl with a daemon, in a terminal, and of its structure.

mod dependencies;
mod end_to_end;
mod terminal;
