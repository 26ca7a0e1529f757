"""The modules that run inside the sandbox: they are sent there as text, so that no file of ROLL has to be readable there.

They use only the standard library of any Python 3.8 or later, and import little, because every execution pays for it.
This code is trusted until the program begins, and contains nothing secret.
"""
