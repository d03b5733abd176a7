// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of a real tmemd process. They are one program, because linking takes longer than most of them.

mod common;
mod confined;
mod control;
mod drain;
mod front_ends;
mod hang_up;
mod liars;
mod limits;
mod lost_pages;
mod operate;
mod random;
mod reload;
mod restart;
mod rules;
mod slots;
mod storm;
mod swapped;
mod trace;
mod unauthorized;
mod vms;
mod watchdog;
mod workers;
mod xsa15;
