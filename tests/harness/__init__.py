# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Boots stock Debian cloud kernels under QEMU and drives guest, QEMU and tmemd.

Plain Python without pytest, so that tests, the demo and a developer's shell share
it. Every wait is bounded and ends at a marker; whatever was started is ended by pid.
"""
