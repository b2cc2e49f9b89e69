"""What torch does not promise, by subject: no other folder imports or names what is private in torch.

A module is loaded where its subject is needed, so that no graph pays for a compiler that it does not use. Where the
releases from 2.11 to 2.15 differ, the function says so. A new torch is this folder.
"""
