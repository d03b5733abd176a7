// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the engine through its public interface. They are one program, because linking takes
//! longer than most of them.

mod common;
mod isolation;
mod statistics;
