# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Boots stock Debian cloud kernels under QEMU, and drives the guest, QEMU and tmemd.

The package is plain Python without pytest, so that tests, the demo and a developer's shell share
it. Every wait is bounded and ends at a marker. Every process that it starts is ended by pid.
"""
