// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the guest's ring, and of what the crates may import.

mod independence;
mod module_graph;
mod ring;
