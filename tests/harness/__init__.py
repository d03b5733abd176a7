# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Boots stock Debian cloud kernels under QEMU, and drives the guest, QEMU and tmemd.

The package is plain Python without pytest, so that tests, the demo and a developer's shell share
it. Every wait has a time limit. The package ends each process that it started, by pid.
"""
