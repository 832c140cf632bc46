#!/usr/bin/env bash
#SBATCH --job-name=rftstream-{{ name }}
#SBATCH --nodes={{ settings.nodes }}
#SBATCH --ntasks-per-node=1
{# All nodes alike: tasks of one worker each would fill the first node before the next. #}
#SBATCH --cpus-per-task={{ cpus }}
{% if gpus %}
#SBATCH --gpus-per-node={{ gpus }}
{% endif %}
#SBATCH --time={{ settings.time }}
#SBATCH --signal=B:USR2@{{ warning_s }}
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={{ folder }}/job-%j.log
{% for option in settings.more %}
#SBATCH {{ option }}
{% endfor %}
#
# Written by `rftstream launch slurm`. A job that is started anew goes on with the run.
{% for names in nodes %}
# node {{ loop.index0 }}: {{ names|join(", ") or "nothing" }}
{% endfor %}
{% for line in settings.before %}
{{ line }}
{% endfor %}

files=({{ quoted(files) }})
rftstream=({{ quoted(settings.command) }})
folder={{ quoted([folder]) }}

job() {
{% for step in steps %}
  {{ quoted(step) }} &
  keepers+=($!)
{% endfor %}
}

