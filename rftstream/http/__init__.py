"""HTTP: one client for all servers that are asked, and one server for what this library serves by itself.

address  reads the address of a server, and how often and how long TCP asks whether it is there
client   asks a server: connections are kept, answers have limits, keys are hidden in errors; for threads and for
         event loops
server   answers clients in an event loop; httptools parses
outgoing what a server's connection has written, and whether it was taken
"""
