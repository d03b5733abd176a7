// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmemctl: command line for the daemon's control socket.

fn main() {
    tmemctl::main();
}
