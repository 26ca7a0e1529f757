"""What runs inside of the sandbox: these modules travel there as text, and no file of ROLL's has to be readable there.

They use nothing but the standard library, of whatever Python 3 the machine has (3.8 and later), and import little: every
execution pays for it. What is here is trusted until the program begins, and nothing that is secret is ever here.
"""
