"""The set-up behind `make demo` and `make test`: pinned environments and the built dcr, cached by their pins.

Standard library only, since it runs before anything is installed. Other tools of this repository use it as

    from environments.setup_environments import set_up
    places = set_up()                 # seconds when everything is there already
    places.python("rollout")          # the interpreter of an environment
    places.variables("rollout")       # the environment variables of a process in it, with dcr on its path
"""
