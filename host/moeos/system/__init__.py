# SPDX-License-Identifier: Apache-2.0
"""What one process has: errors, files, memory, threads, signals, its interpreter.

Must not depend on any other room.
"""
