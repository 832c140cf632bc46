#!/usr/bin/env bash
#SBATCH --job-name=rftstream-{{ runs[0].name }}
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
{% if is_array %}
#SBATCH --array=0-{{ runs|length - 1 }}
{% endif %}
#SBATCH --output={{ folder }}/job-{{ '%A_%a' if is_array else '%j' }}.log
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

rftstream=({{ quoted(settings.command) }})

{% for run in runs %}
{% if is_array %}
if [ "$SLURM_ARRAY_TASK_ID" = {{ loop.index0 }} ]; then # {{ run.name }}
{% endif %}
files=({{ quoted(run.files) }})
folder={{ quoted([run.folder]) }}

job() {
{% for step in run.steps %}
  {{ quoted(step) }} &
  keepers+=($!)
{% endfor %}
}
{% if is_array %}
fi
{% endif %}

{% endfor %}
